package extproc

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	epv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"pgregory.net/rapid"
)

// split cuts bytes into buffers at random places.
func split(t *rapid.T, b []byte) mem.BufferSlice {
	var out mem.BufferSlice
	for len(b) > 0 {
		n := rapid.IntRange(1, len(b)).Draw(t, "piece")
		out = append(out, mem.SliceBuffer(b[:n]))
		b = b[n:]
	}
	return out
}

var genWord = rapid.StringMatching(`[a-z0-9:.,-]{0,12}`)

func genValue(t *rapid.T) *structpb.Value {
	switch rapid.IntRange(0, 4).Draw(t, "value") {
	case 0:
		return structpb.NewStringValue(strings.Join(rapid.SliceOfN(genWord, 0, 4).Draw(t, "words"), ", "))
	case 1:
		var l []*structpb.Value
		for range rapid.IntRange(0, 4).Draw(t, "entries") {
			if rapid.Bool().Draw(t, "text") {
				l = append(l, structpb.NewStringValue(genWord.Draw(t, "entry")))
			} else {
				l = append(l, structpb.NewNumberValue(7))
			}
		}
		return structpb.NewListValue(&structpb.ListValue{Values: l})
	case 2:
		return structpb.NewNumberValue(1.5)
	case 3:
		return structpb.NewBoolValue(true)
	}
	return structpb.NewNullValue()
}

func genStruct(t *rapid.T, keys ...string) *structpb.Struct {
	s := &structpb.Struct{Fields: map[string]*structpb.Value{}}
	for _, k := range keys {
		if rapid.Bool().Draw(t, "has "+k) {
			s.Fields[k] = genValue(t)
		}
	}
	return s
}

func genHeaderMap(t *rapid.T) *corev3.HeaderMap {
	hm := &corev3.HeaderMap{}
	for range rapid.IntRange(0, 8).Draw(t, "headers") {
		h := &corev3.HeaderValue{Key: rapid.SampledFrom([]string{":status", ":path", "x-a", "x-request-id", ""}).Draw(t, "key")}
		if rapid.Bool().Draw(t, "raw") {
			h.RawValue = rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "raw_value")
		}
		if rapid.Bool().Draw(t, "plain") {
			h.Value = genWord.Draw(t, "value")
		}
		hm.Headers = append(hm.Headers, h)
	}
	return hm
}

func genRequest(t *rapid.T) *epv3.ProcessingRequest {
	r := &epv3.ProcessingRequest{ObservabilityMode: rapid.Bool().Draw(t, "observability")}
	hdrs := func() *epv3.HttpHeaders {
		h := &epv3.HttpHeaders{EndOfStream: rapid.Bool().Draw(t, "eos")}
		if rapid.Bool().Draw(t, "map") {
			h.Headers = genHeaderMap(t)
		}
		return h
	}
	body := func() *epv3.HttpBody {
		return &epv3.HttpBody{
			Body:                      rapid.SliceOfN(rapid.Byte(), 0, 2000).Draw(t, "body"),
			EndOfStream:               rapid.Bool().Draw(t, "eos"),
			EndOfStreamWithoutMessage: rapid.Bool().Draw(t, "nomsg"),
			GrpcMessageCompressed:     rapid.Bool().Draw(t, "gz"),
			DrainComplete:             rapid.Bool().Draw(t, "drain"),
		}
	}
	switch rapid.IntRange(1, 7).Draw(t, "kind") {
	case 2:
		r.Request = &epv3.ProcessingRequest_RequestHeaders{RequestHeaders: hdrs()}
	case 3:
		r.Request = &epv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: hdrs()}
	case 4:
		r.Request = &epv3.ProcessingRequest_RequestBody{RequestBody: body()}
	case 5:
		r.Request = &epv3.ProcessingRequest_ResponseBody{ResponseBody: body()}
	case 6:
		r.Request = &epv3.ProcessingRequest_RequestTrailers{RequestTrailers: &epv3.HttpTrailers{Trailers: genHeaderMap(t)}}
	case 7:
		r.Request = &epv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &epv3.HttpTrailers{}}
	}
	if rapid.Bool().Draw(t, "metadata") {
		r.MetadataContext = &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{"other": genStruct(t, servedKey)}}
		if rapid.Bool().Draw(t, "lb") {
			r.MetadataContext.FilterMetadata[lbNamespace] = genStruct(t, servedKey, "x")
		}
		if rapid.Bool().Draw(t, "hint") {
			r.MetadataContext.FilterMetadata[subsetNamespace] = genStruct(t, subsetKey, "x")
		}
	}
	if rapid.Bool().Draw(t, "attributes") {
		r.Attributes = map[string]*structpb.Struct{"other": genStruct(t, "request.id")}
		if rapid.Bool().Draw(t, "ours") {
			r.Attributes[attributesKey] = genStruct(t, "request.id", "upstream.address", "x")
		}
	}
	if rapid.Bool().Draw(t, "config") {
		r.ProtocolConfig = &epv3.ProtocolConfiguration{
			RequestBodyMode:                         filterv3.ProcessingMode_BodySendMode(rapid.IntRange(0, 7).Draw(t, "req")),
			ResponseBodyMode:                        filterv3.ProcessingMode_BodySendMode(rapid.IntRange(0, 7).Draw(t, "resp")),
			SendBodyWithoutWaitingForHeaderResponse: rapid.Bool().Draw(t, "eager"),
		}
	}
	if rapid.Bool().Draw(t, "flow") {
		r.FlowControlInit = &epv3.ProcessingRequest_FlowControlInit{InitialWindowUpstreamToSidestream: 65536}
	}
	if rapid.Bool().Draw(t, "window") {
		r.ClientWindowUpdate = &epv3.ProcessingRequest_ClientWindowUpdate{WindowIncrementSidestreamToUpstream: -5}
	}
	return r
}

// genUnknown generates fields that no version defines, groups included.
func genUnknown(t *rapid.T) []byte {
	var b []byte
	for range rapid.IntRange(0, 3).Draw(t, "unknown fields") {
		num := protowire.Number(rapid.IntRange(20, 5000).Draw(t, "num"))
		switch rapid.IntRange(0, 4).Draw(t, "typ") {
		case 0:
			b = protowire.AppendVarint(protowire.AppendTag(b, num, protowire.VarintType), rapid.Uint64().Draw(t, "v"))
		case 1:
			b = protowire.AppendFixed32(protowire.AppendTag(b, num, protowire.Fixed32Type), 1)
		case 2:
			b = protowire.AppendFixed64(protowire.AppendTag(b, num, protowire.Fixed64Type), 1)
		case 3:
			b = protowire.AppendBytes(protowire.AppendTag(b, num, protowire.BytesType), rapid.SliceOf(rapid.Byte()).Draw(t, "b"))
		case 4:
			b = protowire.AppendTag(b, num, protowire.StartGroupType)
			b = protowire.AppendVarint(protowire.AppendTag(b, 1, protowire.VarintType), 9)
			b = protowire.AppendTag(b, num, protowire.EndGroupType)
		}
	}
	return b
}

func wantValue(h *corev3.HeaderValue) string {
	if len(h.GetRawValue()) > 0 {
		return string(h.GetRawValue())
	}
	return h.GetValue()
}

func wantSubset(v *structpb.Value) []string {
	var lists []string
	switch k := v.GetKind().(type) {
	case *structpb.Value_StringValue:
		lists = []string{k.StringValue}
	case *structpb.Value_ListValue:
		for _, e := range k.ListValue.GetValues() {
			lists = append(lists, e.GetStringValue())
		}
	}
	var out []string
	for _, l := range lists {
		for s := range strings.SplitSeq(l, ",") {
			if s = strings.TrimSpace(s); s != "" {
				out = append(out, s)
			}
		}
	}
	return out
}

type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}

// compare checks a decoded message against the result of the generated code.
func compare(t fataler, want *epv3.ProcessingRequest, m *message) {
	t.Helper()
	check := func(what string, ok bool) {
		t.Helper()
		if !ok {
			t.Fatalf("%s differs: %+v\nwant %v", what, m, want)
		}
	}
	kind, last := KindNone, false
	var body *epv3.HttpBody
	var headers []Header
	status := ""
	switch v := want.GetRequest().(type) {
	case *epv3.ProcessingRequest_RequestHeaders:
		kind, last = KindRequestHeaders, v.RequestHeaders.GetEndOfStream()
		for _, h := range v.RequestHeaders.GetHeaders().GetHeaders() {
			headers = append(headers, Header{h.GetKey(), wantValue(h)})
		}
	case *epv3.ProcessingRequest_ResponseHeaders:
		kind, last = KindResponseHeaders, v.ResponseHeaders.GetEndOfStream()
		for _, h := range v.ResponseHeaders.GetHeaders().GetHeaders() {
			if h.GetKey() == ":status" {
				status = wantValue(h)
			}
		}
	case *epv3.ProcessingRequest_RequestBody:
		kind, body = KindRequestBody, v.RequestBody
	case *epv3.ProcessingRequest_ResponseBody:
		kind, body = KindResponseBody, v.ResponseBody
	case *epv3.ProcessingRequest_RequestTrailers:
		kind = KindRequestTrailers
	case *epv3.ProcessingRequest_ResponseTrailers:
		kind = KindResponseTrailers
	}
	check("kind", m.kind == kind)
	if body != nil {
		last = body.GetEndOfStream()
		check("compressed", m.compressed == body.GetGrpcMessageCompressed())
		check("without message", m.withoutMessage == body.GetEndOfStreamWithoutMessage())
	}
	check("last", m.last == last)
	check("body", bytes.Equal(m.body.Materialize(), body.GetBody()))
	check("size", m.size == len(body.GetBody()))
	check("headers", slices.Equal(m.headers, headers))
	check("status", m.status == status)
	check("observed", m.observed == want.GetObservabilityMode())
	check("flow control", m.flowControl == (want.GetFlowControlInit() != nil))
	pc := want.GetProtocolConfig()
	check("configured", m.configured == (pc != nil))
	check("request mode", m.reqMode == bodyMode(uint64(pc.GetRequestBodyMode())))
	check("response mode", m.respMode == bodyMode(uint64(pc.GetResponseBodyMode())))
	check("eager", m.eager == pc.GetSendBodyWithoutWaitingForHeaderResponse())
	meta := want.GetMetadataContext().GetFilterMetadata()
	check("served", m.served == meta[lbNamespace].GetFields()[servedKey].GetStringValue())
	hint, has := meta[subsetNamespace].GetFields()[subsetKey]
	check("has subset", m.hasSubset == has)
	check("subset", slices.Equal(m.subset, wantSubset(hint)))
	attr := want.GetAttributes()[attributesKey].GetFields()
	check("request id", m.requestID == attr["request.id"].GetStringValue())
	check("upstream", m.upstream == attr["upstream.address"].GetStringValue())
}

// Any message decodes to the same content as with the generated code, however it is cut into
// buffers, with unknown fields around.
func TestDecodeEqualsGeneratedCode(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := genRequest(t)
		raw, err := proto.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		raw = append(genUnknown(t), raw...)
		raw = append(raw, genUnknown(t)...)
		m := message{first: true}
		if err := m.decode(split(t, raw)); err != nil {
			t.Fatalf("decode: %v", err)
		}
		compare(t, r, &m)
		m.free()
	})
}

// Metadata of body messages is not read after the first message.
func TestDecodeSkipsMetadataOfLaterBodies(t *testing.T) {
	var raw []byte
	for _, part := range []*epv3.ProcessingRequest{ // in the order of field numbers, as Envoy writes
		{Request: &epv3.ProcessingRequest_ResponseBody{ResponseBody: &epv3.HttpBody{Body: []byte("x")}}},
		{MetadataContext: &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{lbNamespace: {Fields: map[string]*structpb.Value{servedKey: structpb.NewStringValue("1.2.3.4:5")}}}}},
	} {
		b, err := proto.Marshal(part)
		if err != nil {
			t.Fatal(err)
		}
		raw = append(raw, b...)
	}
	m := message{first: true}
	for i, want := range []string{"1.2.3.4:5", ""} {
		if err := m.decode(mem.BufferSlice{mem.SliceBuffer(raw)}); err != nil {
			t.Fatal(err)
		}
		if m.served != want {
			t.Errorf("message %d: served %q, want %q", i, m.served, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	seed := func(r *epv3.ProcessingRequest) {
		raw, err := proto.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw, uint16(3))
	}
	gen := rapid.Custom(genRequest)
	for i := range 40 {
		seed(gen.Example(i))
	}
	f.Add([]byte{0x22, 0x02, 0x0a, 0xff}, uint16(1))
	f.Fuzz(func(t *testing.T, raw []byte, cut uint16) {
		var bufs mem.BufferSlice
		for b := raw; len(b) > 0; {
			n := min(int(cut%64)+1, len(b))
			bufs = append(bufs, mem.SliceBuffer(b[:n]))
			b = b[n:]
		}
		m := message{first: true}
		err := m.decode(bufs)
		if err != nil && m.body != nil {
			t.Fatal("got a body after an error, want none")
		}
		m.free()
		want := &epv3.ProcessingRequest{}
		if proto.Unmarshal(raw, want) != nil {
			return
		}
		// A message that the generated code has read and written again decodes to the same
		// content.
		canonical, err := proto.Marshal(want)
		if err != nil {
			return
		}
		m = message{first: true}
		if err := m.decode(mem.BufferSlice{mem.SliceBuffer(canonical)}); err != nil {
			t.Fatalf("decode of a valid message: %v", err)
		}
		compare(t, want, &m)
	})
}

type validator interface {
	proto.Message
	ValidateAll() error
}

// parse reads an answer with the generated code and validates it.
func parse(t fataler, a *answer) *epv3.ProcessingResponse {
	t.Helper()
	r := &epv3.ProcessingResponse{}
	if err := proto.Unmarshal(a.bufs.Materialize(), r); err != nil {
		t.Fatalf("answer does not parse: %v", err)
	}
	if err := validator(r).ValidateAll(); err != nil {
		t.Fatalf("answer is not valid: %v", err)
	}
	return r
}

func same(t fataler, got, want *epv3.ProcessingResponse) {
	t.Helper()
	if !proto.Equal(got, want) {
		t.Fatalf("answer\n got %v\nwant %v", got, want)
	}
}

func wantMutation(m mutation) *epv3.HeaderMutation {
	if m.empty() {
		return nil
	}
	out := &epv3.HeaderMutation{RemoveHeaders: m.remove}
	for _, h := range m.set {
		hv := &corev3.HeaderValue{Key: h.Name}
		if h.Value != "" {
			hv.RawValue = []byte(h.Value)
		}
		out.SetHeaders = append(out.SetHeaders, &corev3.HeaderValueOption{Header: hv, AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD})
	}
	return out
}

func wantPick(pick string) *structpb.Struct {
	if pick == "" {
		return nil
	}
	return &structpb.Struct{Fields: map[string]*structpb.Value{lbNamespace: structpb.NewStructValue(&structpb.Struct{
		Fields: map[string]*structpb.Value{pickKey: structpb.NewStringValue(pick)}})}}
}

func TestAnswersReadByGeneratedCode(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := rapid.SampledFrom([]Kind{KindRequestHeaders, KindRequestBody, KindResponseHeaders}).Draw(t, "kind")
		c := common{clearRoute: rapid.Bool().Draw(t, "clear"), pick: rapid.SampledFrom([]string{"", "10.0.0.1:8000"}).Draw(t, "pick")}
		for i := range rapid.IntRange(0, 3).Draw(t, "set") {
			c.mutation.put("x-h"+strings.Repeat("i", i), rapid.StringN(0, 400, -1).Draw(t, "value"))
		}
		if rapid.Bool().Draw(t, "remove") {
			c.mutation.drop("x-gone")
		}
		var body []byte
		if k == KindRequestBody && rapid.Bool().Draw(t, "replace") {
			body = rapid.SliceOfN(rapid.Byte(), 0, 700).Draw(t, "body")
			c.replace, c.bodySize = true, len(body)
			c.body = split(t, body)
		}
		cr := &epv3.CommonResponse{HeaderMutation: wantMutation(c.mutation)}
		cr.ClearRouteCache = c.clearRoute && !c.mutation.empty()
		if c.replace {
			cr.BodyMutation = &epv3.BodyMutation{Mutation: &epv3.BodyMutation_Body{Body: body}}
			if len(body) == 0 {
				cr.BodyMutation = &epv3.BodyMutation{Mutation: &epv3.BodyMutation_ClearBody{ClearBody: true}}
			}
		}
		if cr.GetHeaderMutation() == nil && cr.GetBodyMutation() == nil {
			cr = nil
		}
		want := &epv3.ProcessingResponse{DynamicMetadata: wantPick(c.pick)}
		switch k {
		case KindRequestHeaders:
			want.Response = &epv3.ProcessingResponse_RequestHeaders{RequestHeaders: &epv3.HeadersResponse{Response: cr}}
		case KindResponseHeaders:
			want.Response = &epv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: &epv3.HeadersResponse{Response: cr}}
		default:
			want.Response = &epv3.ProcessingResponse_RequestBody{RequestBody: &epv3.BodyResponse{Response: cr}}
		}
		same(t, parse(t, c.encode(k)), want)
	})
}

func TestEchoReadByGeneratedCode(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		body := rapid.SliceOfN(rapid.Byte(), 0, 400).Draw(t, "body")
		p := piece{last: rapid.Bool().Draw(t, "last"), compressed: rapid.Bool().Draw(t, "gz"), withoutMessage: rapid.Bool().Draw(t, "none")}
		got := parse(t, echo(KindResponseBody, split(t, body), len(body), p))
		same(t, got, &epv3.ProcessingResponse{Response: &epv3.ProcessingResponse_ResponseBody{ResponseBody: &epv3.BodyResponse{
			Response: &epv3.CommonResponse{BodyMutation: &epv3.BodyMutation{Mutation: &epv3.BodyMutation_StreamedResponse{
				StreamedResponse: &epv3.StreamedBodyResponse{Body: body, EndOfStream: p.last, GrpcMessageCompressed: p.compressed, EndOfStreamWithoutMessage: p.withoutMessage}}}}}}})
	})
}

func TestConstantAnswers(t *testing.T) {
	same(t, parse(t, empty[KindRequestHeaders]), &epv3.ProcessingResponse{Response: &epv3.ProcessingResponse_RequestHeaders{RequestHeaders: &epv3.HeadersResponse{}}})
	same(t, parse(t, empty[KindResponseHeaders]), &epv3.ProcessingResponse{Response: &epv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: &epv3.HeadersResponse{}}})
	same(t, parse(t, empty[KindRequestBody]), &epv3.ProcessingResponse{Response: &epv3.ProcessingResponse_RequestBody{RequestBody: &epv3.BodyResponse{}}})
	same(t, parse(t, empty[KindResponseBody]), &epv3.ProcessingResponse{Response: &epv3.ProcessingResponse_ResponseBody{ResponseBody: &epv3.BodyResponse{}}})
	same(t, parse(t, empty[KindRequestTrailers]), &epv3.ProcessingResponse{Response: &epv3.ProcessingResponse_RequestTrailers{RequestTrailers: &epv3.TrailersResponse{}}})
	same(t, parse(t, empty[KindResponseTrailers]), &epv3.ProcessingResponse{Response: &epv3.ProcessingResponse_ResponseTrailers{ResponseTrailers: &epv3.TrailersResponse{}}})
	same(t, parse(t, cleared), &epv3.ProcessingResponse{Response: &epv3.ProcessingResponse_RequestBody{RequestBody: &epv3.BodyResponse{
		Response: &epv3.CommonResponse{BodyMutation: &epv3.BodyMutation{Mutation: &epv3.BodyMutation_ClearBody{ClearBody: true}}}}}})
	same(t, parse(t, windowUpdate), &epv3.ProcessingResponse{ServerWindowUpdate: &epv3.ProcessingResponse_ServerWindowUpdate{
		WindowIncrementDownstreamToSidestream: windowGrant, WindowIncrementUpstreamToSidestream: windowGrant}})
	same(t, parse(t, extendTimeout(90*time.Second+5*time.Millisecond)), &epv3.ProcessingResponse{OverrideMessageTimeout: durationpb.New(90*time.Second + 5*time.Millisecond)})
	same(t, parse(t, trailersPick("1.1.1.1:1")), &epv3.ProcessingResponse{DynamicMetadata: wantPick("1.1.1.1:1"),
		Response: &epv3.ProcessingResponse_RequestTrailers{RequestTrailers: &epv3.TrailersResponse{}}})
	c := common{override: &modeOverride{request: ModeBuffered}}
	same(t, parse(t, c.encode(KindResponseHeaders)), &epv3.ProcessingResponse{
		Response: &epv3.ProcessingResponse_ResponseHeaders{ResponseHeaders: &epv3.HeadersResponse{}},
		ModeOverride: &filterv3.ProcessingMode{RequestBodyMode: filterv3.ProcessingMode_BUFFERED, ResponseBodyMode: filterv3.ProcessingMode_NONE,
			ResponseTrailerMode: filterv3.ProcessingMode_SEND}})
}

func TestImmediateReadByGeneratedCode(t *testing.T) {
	tests := []struct {
		name string
		in   Reject
		want *epv3.ImmediateResponse
	}{
		{"json", Reject{Status: 429, Body: []byte(`{"error":{}}`), Headers: []Header{{"Retry-After", "3"}}, Details: "shed it"}, &epv3.ImmediateResponse{
			Status: &typev3.HttpStatus{Code: 429}, Body: []byte(`{"error":{}}`), Details: "shed_it",
			Headers: wantMutation(mutation{set: []Header{{"retry-after", "3"}, {"content-type", "application/json"}}})}},
		{"own type", Reject{Status: 503, Body: []byte("no"), Headers: []Header{{"content-type", "text/plain"}, {"bad name", "x"}, {"content-length", "9"}}}, &epv3.ImmediateResponse{
			Status: &typev3.HttpStatus{Code: 503}, Body: []byte("no"), Headers: wantMutation(mutation{set: []Header{{"content-type", "text/plain"}}})}},
		{"no body, odd status", Reject{Status: 99}, &epv3.ImmediateResponse{Status: &typev3.HttpStatus{Code: 500}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			same(t, parse(t, immediate(&tt.in)), &epv3.ProcessingResponse{Response: &epv3.ProcessingResponse_ImmediateResponse{ImmediateResponse: tt.want}})
		})
	}
}

// Other services on the same server use the ordinary protobuf codec.
func TestCodecFallsBack(t *testing.T) {
	c := Codec()
	in := &grpc_health_v1.HealthCheckRequest{Service: "readiness"}
	b, err := c.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	out := &grpc_health_v1.HealthCheckRequest{}
	if err := c.Unmarshal(b, out); err != nil || !proto.Equal(in, out) || c.Name() != "proto" {
		t.Fatalf("got %v, %v, name %q", out, err, c.Name())
	}
	if _, err := c.Marshal(42); err == nil {
		t.Error("got a number marshalled, want an error")
	}
}

// Whatever a header contains, the result is a header that Envoy accepts.
func TestHeadersAreSanitised(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := &Decision{Set: []Header{{rapid.String().Draw(t, "name"), string(rapid.SliceOf(rapid.Byte()).Draw(t, "value"))}}, Remove: []string{rapid.String().Draw(t, "gone")}}
		ctl := newControls(DefaultControlHeaders)
		m, _ := ctl.requestMutation(&headerView{}, d, "")
		for _, h := range m.set {
			if strings.ContainsAny(h.Value, "\x00\r\n\x7f") {
				t.Fatalf("value %q", h.Value)
			}
		}
		c := common{mutation: m}
		parse(t, c.encode(KindRequestHeaders)) // validates names and lengths
	})
}
