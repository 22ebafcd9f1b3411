package extproc

import (
	"strings"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// Names defined by the endpoint picker protocol and by Envoy.
const (
	pickKey         = "x-gateway-destination-endpoint"
	lbNamespace     = "envoy.lb"
	servedKey       = "x-gateway-destination-endpoint-served"
	subsetNamespace = "envoy.lb.subset_hint"
	subsetKey       = "x-gateway-destination-endpoint-subset"
	attributesKey   = "envoy.filters.http.ext_proc"
	requestIDKey    = "x-request-id"
)

// message holds the fields in use of a ProcessingRequest. It is reused for the messages of a
// stream; it owns body until that is freed or taken.
type message struct {
	// first must be set before the first message of a stream is decoded: that message carries
	// metadata and configuration, whatever its kind.
	first     bool
	prefix    [5]byte // gRPC's: compressed or not, length
	addressed bool    // client is to be read; must be set like first

	kind Kind
	last bool            // end_of_stream
	body mem.BufferSlice // references into the receive buffers
	size int             // bytes of body
	// GRPC body mode
	compressed, withoutMessage bool

	about   int      // encoded bytes of request headers, metadata and attributes
	tooLong bool     // they are more than maxAbout, and were not all read
	headers []Header // request headers only, pseudo headers included
	status  string   // :status of response headers

	configured        bool // protocol_config is present
	reqMode, respMode Mode
	eager             bool // send_body_without_waiting_for_header_response
	observed          bool // observability_mode
	flowControl       bool // flow_control_init is present

	subset    []string
	hasSubset bool
	served    string  // address of the endpoint that served the request, from the data plane's metadata
	upstream  string  // attribute upstream.address
	requestID string  // attribute request.id
	client    address // attribute source.address
}

func (m *message) free() {
	m.body.Free()
	m.body = nil
	m.size = 0
}

// take transfers ownership of the body references to the caller.
func (m *message) take() (mem.BufferSlice, int) {
	b, n := m.body, m.size
	m.body, m.size = nil, 0
	return b, n
}

// reset clears the content and keeps the storage.
func (m *message) reset() {
	m.free()
	*m = message{first: m.first, addressed: m.addressed, headers: m.headers[:0]}
}

// resetOneof clears the content of the request oneof.
func (m *message) resetOneof() {
	m.free()
	m.last, m.compressed, m.withoutMessage = false, false, false
	m.headers, m.status = m.headers[:0], ""
}

// decode reads a ProcessingRequest. On error the message holds no references.
func (m *message) decode(data mem.BufferSlice) error {
	m.reset()
	c := cursor{bufs: data}
	err := m.decodeFields(&c, data.Len())
	if err != nil {
		m.free()
	}
	m.first = false
	return err
}

func (m *message) decodeFields(c *cursor, end int) error {
	return c.eachField(end, func(num protowire.Number, typ protowire.Type, v uint64) error {
		switch {
		case typ == protowire.VarintType && num == 10:
			m.observed = v != 0
		case typ == protowire.BytesType && (num >= 2 && num <= 9 || num == 11 || num == 12):
			return m.decodePart(c, num, int(v))
		case typ == protowire.BytesType:
			return c.skip(int(v))
		}
		return nil
	})
}

// decodePart reads one sub-message of n bytes.
func (m *message) decodePart(c *cursor, num protowire.Number, n int) error {
	if num <= 7 {
		if k := Kind(num); m.kind != k {
			m.resetOneof()
			m.kind = k
		}
		switch {
		case m.kind.isBody():
			return m.decodeBody(c, c.pos+n)
		case !m.kind.isHeaders():
			return c.skip(n)
		}
	}
	if (num == 8 || num == 9) && !m.first && m.kind != KindNone && !m.kind.isHeaders() {
		return c.skip(n)
	}
	if num == 2 || num == 8 || num == 9 {
		if m.about += n; m.about > maxAbout {
			m.tooLong = true
			return c.skip(n)
		}
	}
	b, err := c.bytes(n)
	if err != nil {
		return err
	}
	switch num {
	case 2, 3:
		return m.decodeHeaders(b)
	case 8:
		return eachMapEntry(b, m.metadata)
	case 9:
		return m.decodeAttributes(b)
	case 11:
		return m.decodeConfig(b)
	case 12:
		m.flowControl = true
	}
	return nil
}

// decodeBody reads an HttpBody that ends at end.
func (m *message) decodeBody(c *cursor, end int) error {
	err := c.eachField(end, func(num protowire.Number, typ protowire.Type, v uint64) (err error) {
		switch {
		case typ == protowire.BytesType && num == 1:
			m.free()
			m.size = int(v)
			m.body, err = c.refs(m.size, m.body)
		case typ == protowire.BytesType:
			err = c.skip(int(v))
		case num == 2:
			m.last = v != 0
		case num == 3:
			m.withoutMessage = v != 0
		case num == 4:
			m.compressed = v != 0
		}
		return err
	})
	if err == nil && c.pos != end {
		err = errMalformed
	}
	return err
}

// decodeHeaders reads an HttpHeaders.
func (m *message) decodeHeaders(b []byte) error {
	return eachField(b, func(num protowire.Number, typ protowire.Type, v []byte, x uint64) error {
		switch {
		case num == 1 && typ == protowire.BytesType && m.kind == KindRequestHeaders:
			return m.requestHeaders(v)
		case num == 1 && typ == protowire.BytesType:
			return m.responseStatus(v)
		case num == 3 && typ == protowire.VarintType:
			m.last = x != 0
		}
		return nil
	})
}

// headerRoom is the initial capacity for a request's headers.
const headerRoom = 24

// requestHeaders reads a HeaderMap. All names and values share one string.
func (m *message) requestHeaders(b []byte) error {
	if m.headers == nil {
		m.headers = make([]Header, 0, headerRoom)
	}
	text := string(b)
	within := func(v []byte) string {
		if len(v) == 0 {
			return ""
		}
		off := cap(b) - cap(v) // v is a part of b
		return text[off : off+len(v)]
	}
	return eachMapEntry(b, func(key, value []byte) error {
		if len(m.headers) <= mostHeaders { // one more than is taken, which has the request refused
			m.headers = append(m.headers, Header{Name: within(key), Value: within(value)})
		}
		return nil
	})
}

func (m *message) responseStatus(b []byte) error {
	return eachMapEntry(b, func(key, value []byte) error {
		if string(key) == ":status" {
			m.status = string(value)
		}
		return nil
	})
}

// keyValue reads an entry of a map with string keys and message values, or a HeaderValue. Envoy fills raw_value of the
// latter, other data planes may fill value.
func keyValue(b []byte) (key, value []byte, err error) {
	var raw []byte
	for len(b) > 0 {
		num, typ, v, _, rest, err := field(b)
		if err != nil {
			return nil, nil, err
		}
		if typ == protowire.BytesType {
			switch num {
			case 1:
				key = v
			case 2:
				value = v
			case 3:
				raw = v
			}
		}
		b = rest
	}
	if len(raw) > 0 {
		value = raw
	}
	return key, value, nil
}

// decodeConfig reads a ProtocolConfiguration.
func (m *message) decodeConfig(b []byte) error {
	m.configured = true
	return eachField(b, func(num protowire.Number, typ protowire.Type, _ []byte, x uint64) error {
		if typ != protowire.VarintType {
			return nil
		}
		switch num {
		case 1:
			m.reqMode = bodyMode(x)
		case 2:
			m.respMode = bodyMode(x)
		case 3:
			m.eager = x != 0
		}
		return nil
	})
}

// bodyMode reads a BodySendMode. An unknown mode, added to Envoy later, is treated as STREAMED,
// which answers every message.
func bodyMode(x uint64) Mode {
	if x > uint64(ModeGRPC) {
		return ModeStreamed
	}
	return Mode(x)
}

// metadata reads one namespace of metadata_context.filter_metadata.
func (m *message) metadata(namespace, value []byte) error {
	switch string(namespace) {
	case lbNamespace:
		m.served = ""
		return eachMapEntry(value, func(k, v []byte) error {
			if string(k) != servedKey {
				return nil
			}
			s, err := stringValue(v)
			m.served = s
			return err
		})
	case subsetNamespace:
		m.subset, m.hasSubset = nil, false
		return eachMapEntry(value, func(k, v []byte) error {
			if string(k) != subsetKey {
				return nil
			}
			m.hasSubset = true
			m.subset = nil
			return m.decodeSubset(v)
		})
	}
	return nil
}

// decodeSubset reads a list of strings, or one string with commas.
func (m *message) decodeSubset(value []byte) error {
	return eachField(value, func(num protowire.Number, typ protowire.Type, v []byte, _ uint64) error {
		if num >= 1 && num <= 6 {
			m.subset = m.subset[:0] // the last member of the oneof counts
		}
		if typ != protowire.BytesType {
			return nil
		}
		switch num {
		case 3:
			m.addSubset(string(v))
		case 6:
			return eachField(v, func(num protowire.Number, typ protowire.Type, v []byte, _ uint64) error {
				if num != 1 || typ != protowire.BytesType {
					return nil
				}
				s, err := stringValue(v)
				m.addSubset(s)
				return err
			})
		}
		return nil
	})
}

func (m *message) addSubset(list string) {
	for s := range strings.SplitSeq(list, ",") {
		if s = strings.TrimSpace(s); s != "" {
			m.subset = append(m.subset, s)
		}
	}
}

// decodeAttributes reads one entry of the map attributes.
func (m *message) decodeAttributes(entry []byte) error {
	key, value, err := keyValue(entry)
	if err != nil || string(key) != attributesKey {
		return err
	}
	m.requestID, m.upstream = "", ""
	return eachMapEntry(value, func(k, v []byte) error {
		var err error
		switch string(k) {
		case "request.id":
			m.requestID, err = stringValue(v)
		case "upstream.address":
			m.upstream, err = stringValue(v)
		case "source.address":
			if m.addressed {
				var text []byte
				text, err = stringBytes(v)
				m.client = clientAddress(text)
			}
		}
		return err
	})
}
