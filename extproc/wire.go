package extproc

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// field reads the first field of b: v is the content if typ is BytesType, x the value if it is VarintType.
func field(b []byte) (num protowire.Number, typ protowire.Type, v []byte, x uint64, rest []byte, err error) {
	num, typ, n := protowire.ConsumeTag(b)
	if n < 0 {
		return 0, 0, nil, 0, nil, errMalformed
	}
	b = b[n:]
	switch typ {
	case protowire.BytesType:
		v, n = protowire.ConsumeBytes(b)
	case protowire.VarintType:
		x, n = protowire.ConsumeVarint(b)
	default:
		n = protowire.ConsumeFieldValue(num, typ, b)
	}
	if n < 0 {
		return 0, 0, nil, 0, nil, errMalformed
	}
	return num, typ, v, x, b[n:], nil
}

// eachField calls f for each field of the message b.
func eachField(b []byte, f func(num protowire.Number, typ protowire.Type, v []byte, x uint64) error) error {
	for len(b) > 0 {
		num, typ, v, x, rest, err := field(b)
		if err != nil {
			return err
		}
		if err := f(num, typ, v, x); err != nil {
			return err
		}
		b = rest
	}
	return nil
}

// eachMapEntry calls f for each entry of the map in field 1 of the message b (Metadata, Struct), or for each
// HeaderValue of a HeaderMap.
func eachMapEntry(b []byte, f func(key, value []byte) error) error {
	return eachField(b, func(n protowire.Number, typ protowire.Type, v []byte, _ uint64) error {
		if n != 1 || typ != protowire.BytesType {
			return nil
		}
		key, value, err := keyValue(v)
		if err != nil {
			return err
		}
		return f(key, value)
	})
}

// stringValue reads a google.protobuf.Value; anything but a string is "".
func stringValue(b []byte) (string, error) {
	s, err := stringBytes(b)
	return string(s), err
}

// stringBytes is stringValue as a part of b.
func stringBytes(b []byte) (s []byte, err error) {
	err = eachField(b, func(num protowire.Number, typ protowire.Type, v []byte, _ uint64) error {
		switch {
		case num == 3 && typ == protowire.BytesType:
			s = v
		case num >= 1 && num <= 6:
			s = nil
		}
		return nil
	})
	return s, err
}

// parts counts the messages, strings and bytes fields in b, a message of type d. It stops above most, and returns
// most+1 for messages nested deeper than depth. A part takes up to 130 bytes decoded, but as few as two encoded.
func parts(b []byte, d protoreflect.MessageDescriptor, most, depth int) (n int) {
	if depth < 0 {
		return most + 1
	}
	fields := d.Fields()
	for len(b) > 0 && n <= most {
		num, typ, v, _, rest, err := field(b)
		if err != nil {
			break // the decoder says so
		}
		b = rest
		if fd := fields.ByNumber(num); fd != nil && typ != protowire.VarintType && !fd.IsPacked() {
			n++
			if inner := fd.Message(); inner != nil {
				n += parts(v, inner, most-n, depth-1)
			}
		}
	}
	return n
}
