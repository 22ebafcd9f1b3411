package jinja

import "testing"

// AsDict returns a nil *Dict for other kinds of values, which clients may send.
func TestNilDictReadsAsEmpty(t *testing.T) {
	d, ok := String("x").AsDict()
	if d != nil || ok {
		t.Fatalf("AsDict of a string: got %v, %v, want nil, false", d, ok)
	}
	if v, ok := d.Get("a"); ok || !v.IsUndefined() {
		t.Errorf("Get: got %v, %v, want undefined, false", v, ok)
	}
	if n := d.Len(); n != 0 {
		t.Errorf("Len: got %d, want 0", n)
	}
	d.Range(func(k, _ Value) bool { t.Errorf("Range: got key %v, want none", k); return true })
	c := d.Clone()
	c.Set("a", Int(1))
	if v, ok := c.Get("a"); !ok || v != Int(1) {
		t.Errorf("Clone: got %v, %v after Set, want 1, true", v, ok)
	}
}
