package extproc

import "google.golang.org/protobuf/encoding/protowire"

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

// eachMapEntry calls f for each entry of the map in field 1 of the message b, where Metadata and Struct have theirs, or for each
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
	s := ""
	err := eachField(b, func(num protowire.Number, typ protowire.Type, v []byte, _ uint64) error {
		switch {
		case num == 3 && typ == protowire.BytesType:
			s = string(v)
		case num >= 1 && num <= 6:
			s = ""
		}
		return nil
	})
	return s, err
}
