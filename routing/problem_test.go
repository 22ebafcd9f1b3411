package routing

import (
	"math"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

// spoil puts a value out of bounds into every number and name.
func spoil(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for _, f := range v.Fields() {
			spoil(f)
		}
	case reflect.Array:
		for i := range v.Len() {
			spoil(v.Index(i))
		}
	case reflect.String:
		v.SetString("bogus")
	case reflect.Int, reflect.Int64:
		v.SetInt(-1)
	case reflect.Float64:
		v.SetFloat(math.NaN())
	}
}

// yamlPaths lists the keys of a section that hold a number or a name with bounds.
func yamlPaths(v reflect.Value, path string, into map[string]bool) {
	switch v.Kind() {
	case reflect.Struct:
		for f, fv := range v.Fields() {
			yamlPaths(fv, strings.TrimPrefix(path+"."+f.Tag.Get("yaml"), "."), into)
		}
	case reflect.Array:
		for i := range v.Len() {
			yamlPaths(v.Index(i), path+"["+strconv.Itoa(i)+"]", into)
		}
	case reflect.String, reflect.Int, reflect.Int64, reflect.Float64:
		into[path] = true
	}
}

func TestEverySettingIsCheckedUnderItsKey(t *testing.T) {
	c := DefaultConfig()
	if err := c.Validate(); err != nil || len(c.Problems()) != 0 {
		t.Fatal(err)
	}
	spoil(reflect.ValueOf(&c).Elem())
	want := map[string]bool{}
	yamlPaths(reflect.ValueOf(&c).Elem(), "", want)
	delete(want, "disagg.threshold") // any number is a threshold
	delete(want, "-")                // is not read from a file
	text := c.Validate().Error()
	for _, p := range c.Problems() {
		if !want[p.Path] {
			t.Errorf("%s is no key, or is named twice", p.Path)
		}
		delete(want, p.Path)
		if !strings.Contains(text, p.Path+": "+p.Text) {
			t.Errorf("the error does not tell %v", p)
		}
	}
	for path := range want {
		t.Errorf("%s is not checked", path)
	}
}
