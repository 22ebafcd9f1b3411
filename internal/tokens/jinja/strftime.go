package jinja

import (
	"fmt"
	"strings"
	"time"
)

// strftimeVerbs maps the verbs of Python's strftime in the C locale to layouts of package time.
var strftimeVerbs = map[byte]string{
	'a': "Mon", 'A': "Monday", 'b': "Jan", 'h': "Jan", 'B': "January", 'd': "02", 'e': "_2", 'j': "002", 'm': "01", 'y': "06", 'Y': "2006",
	'H': "15", 'I': "03", 'p': "PM", 'M': "04", 'S': "05", 'T': "15:04:05", 'R': "15:04", 'X': "15:04:05",
	'D': "01/02/06", 'x': "01/02/06", 'F': "2006-01-02", 'c': "Mon Jan _2 15:04:05 2006", '%': "%",
	'z': "", 'Z': "", // datetime.now() has no time zone
}

// verbAt reads the verb after the percent sign at format[i]; "-" is glibc's flag that drops leading zeros.
func verbAt(format string, i int) (layout string, flag bool, end int, ok bool) {
	i++
	if flag = i+1 < len(format) && format[i] == '-'; flag {
		i++
	}
	if i >= len(format) {
		return "", flag, len(format), false
	}
	layout, ok = strftimeVerbs[format[i]]
	return layout, flag, i + 1, ok
}

// strftime is Python's datetime.strftime. unknown is the first verb of the format that is not supported, "" if all are.
func strftime(t time.Time, format string) (text, unknown string) {
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			b.WriteByte(format[i])
			continue
		}
		layout, flag, end, ok := verbAt(format, i)
		if !ok {
			return "", format[i:end]
		}
		i = end - 1
		text := t.Format(layout)
		if layout == "2006" {
			text = fmt.Sprint(t.Year()) // time.Format pads years before 1000
		}
		if flag {
			text = strings.TrimLeft(text, "0 ")
			if text == "" && layout != "" {
				text = "0"
			}
		}
		b.WriteString(text)
	}
	return b.String(), ""
}
