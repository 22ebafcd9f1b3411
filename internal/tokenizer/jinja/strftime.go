package jinja

import (
	"fmt"
	"strings"
	"time"
)

var strftimeVerbs map[byte]func(t time.Time) string

func layout(l string) func(time.Time) string {
	return func(t time.Time) string { return t.Format(l) }
}

func init() { //nolint:gochecknoinits // %c and its like refer to the table
	strftimeVerbs = map[byte]func(t time.Time) string{
		'a': layout("Mon"), 'A': layout("Monday"), 'b': layout("Jan"), 'h': layout("Jan"), 'B': layout("January"),
		'd': layout("02"), 'e': layout("_2"), 'm': layout("01"), 'y': layout("06"),
		'H': layout("15"), 'I': layout("03"), 'p': layout("PM"), 'M': layout("04"), 'S': layout("05"),
		'P': layout("pm"), 'T': layout("15:04:05"), 'X': layout("15:04:05"), 'R': layout("15:04"), 'r': layout("03:04:05 PM"),
		'D': layout("01/02/06"), 'x': layout("01/02/06"), 'F': layout("2006-01-02"), 'c': layout("Mon Jan _2 15:04:05 2006"),
		'Y': func(t time.Time) string { return fmt.Sprint(t.Year()) },
		'C': func(t time.Time) string { return fmt.Sprintf("%02d", t.Year()/100) },
		'f': func(t time.Time) string { return fmt.Sprintf("%06d", t.Nanosecond()/1000) },
		'j': func(t time.Time) string { return fmt.Sprintf("%03d", t.YearDay()) },
		'k': func(t time.Time) string { return fmt.Sprintf("%2d", t.Hour()) },
		'l': func(t time.Time) string { return fmt.Sprintf("%2d", (t.Hour()+11)%12+1) },
		's': func(t time.Time) string { return fmt.Sprint(t.Unix()) },
		'u': func(t time.Time) string { return fmt.Sprint((int(t.Weekday())+6)%7 + 1) },
		'w': func(t time.Time) string { return fmt.Sprint(int(t.Weekday())) },
		'U': func(t time.Time) string { return fmt.Sprintf("%02d", (t.YearDay()+6-int(t.Weekday()))/7) },
		'W': func(t time.Time) string { return fmt.Sprintf("%02d", (t.YearDay()+6-(int(t.Weekday())+6)%7)/7) },
		'V': func(t time.Time) string { _, w := t.ISOWeek(); return fmt.Sprintf("%02d", w) },
		'G': func(t time.Time) string { y, _ := t.ISOWeek(); return fmt.Sprint(y) },
		'g': func(t time.Time) string { y, _ := t.ISOWeek(); return fmt.Sprintf("%02d", y%100) },
		'n': func(time.Time) string { return "\n" }, 't': func(time.Time) string { return "\t" }, '%': func(time.Time) string { return "%" },
		// datetime.now() carries no time zone: both are empty.
		'z': func(time.Time) string { return "" }, 'Z': func(time.Time) string { return "" },
	}
}

// strftime is Python's datetime.strftime in the C locale, with the "-" flag of
// glibc that drops leading zeros.
func strftime(t time.Time, format string) string {
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' || i+1 >= len(format) {
			b.WriteByte(format[i])
			continue
		}
		i++
		flag := byte(0)
		if strings.IndexByte("-_0^", format[i]) >= 0 && i+1 < len(format) {
			flag = format[i]
			i++
		}
		verb := strftimeVerbs[format[i]]
		if verb == nil {
			b.WriteByte('%')
			if flag != 0 {
				b.WriteByte(flag)
			}
			b.WriteByte(format[i])
			continue
		}
		text := verb(t)
		switch flag {
		case '-':
			if trimmed := strings.TrimLeft(text, "0 "); trimmed != "" {
				text = trimmed
			} else if text != "" {
				text = "0"
			}
		case '^':
			text = strings.ToUpper(text)
		case '_':
			for j := 0; j < len(text)-1 && text[j] == '0'; j++ {
				text = text[:j] + " " + text[j+1:]
			}
		case '0':
			text = strings.ReplaceAll(text, " ", "0")
		}
		b.WriteString(text)
	}
	return b.String()
}
