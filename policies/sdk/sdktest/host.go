//go:build !wasip1

package sdktest

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// host is the node in one exchange. As the node does, it panics at what the ABI
// forbids.
type host struct {
	policy    *Policy
	features  uint32
	url       *url.URL
	afterNext bool

	method, protocol, uri string
	requestHeader         http.Header
	requestTrailer        http.Header
	status                int
	responseHeader        http.Header
	responseTrailer       http.Header
	came                  [2][]byte        // bodies as they came
	read                  [2]int           // how far they were read
	written               [2]*bytes.Buffer // bodies that replace them

	references references
	sent       Result
	denied     bool
	reason     string
	notes      []string
	log        []string
}

var _ abi.Host = (*host)(nil)

func newHost(p *Policy, r *http.Request) *host {
	h := &host{
		policy: p, features: p.features, url: r.URL,
		method: r.Method, protocol: r.Proto, uri: pathAndQuery(r.URL),
		requestHeader: r.Header.Clone(), requestTrailer: r.Trailer.Clone(),
		status: 200, responseHeader: http.Header{}, responseTrailer: http.Header{},
	}
	if h.requestTrailer == nil {
		h.requestTrailer = http.Header{}
	}
	h.requestHeader.Set("Host", cmp.Or(r.Host, r.URL.Host))
	if r.Body != nil {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(err)
		}
		h.came[abi.RequestBody] = body
		if r.ContentLength > 0 {
			h.requestHeader.Set("Content-Length", fmt.Sprint(r.ContentLength))
		}
	}
	return h
}

// put is how all functions of the ABI give text.
func put(buf []byte, text string) uint32 {
	if len(text) <= len(buf) {
		copy(buf, text)
	}
	return uint32(len(text))
}

func (h *host) need(feature uint32, what string) {
	if h.features&feature == 0 {
		panic("sdktest: the policy needs a feature for " + what + ": see sdk.Policy.Features")
	}
}

// beforeNext guards what concerns the request.
func (h *host) beforeNext(what string) {
	if h.afterNext {
		panic("sdktest: too late to change " + what)
	}
}

// responseMutable guards what concerns the response.
func (h *host) responseMutable(what string) {
	if h.afterNext {
		h.need(abi.BufferResponse, "changing "+what)
	}
}

func (h *host) EnableFeatures(features uint32) uint32 {
	h.features |= features
	return h.features
}

func (h *host) GetConfig(buf []byte) uint32        { return put(buf, h.policy.config) }
func (h *host) LogEnabled(level int32) bool        { return level >= abi.Info }
func (h *host) Log(_ int32, message string)        { h.log = append(h.log, message) }
func (h *host) GetMethod(buf []byte) uint32        { return put(buf, h.method) }
func (h *host) GetURI(buf []byte) uint32           { return put(buf, h.uri) }
func (h *host) GetSourceAddr(buf []byte) uint32    { return put(buf, "198.18.0.2:40000") }
func (h *host) GetStatusCode() uint32              { return uint32(h.status) }
func (h *host) GetProtocolVersion(b []byte) uint32 { return put(b, h.protocol) }

func (h *host) SetMethod(method string) {
	h.beforeNext("the method")
	h.method = method
}

func (h *host) SetURI(uri string) {
	h.beforeNext("the URI")
	if !strings.HasPrefix(uri, "/") {
		panic("sdktest: a URI begins with /, not " + uri)
	}
	h.uri = uri
}

func (h *host) SetStatusCode(code uint32) {
	h.responseMutable("the status")
	h.status = int(code)
}

func (h *host) header(kind uint32) http.Header {
	switch kind {
	case abi.RequestHeader:
		return h.requestHeader
	case abi.ResponseHeader:
		return h.responseHeader
	}
	h.need(abi.Trailers, "trailers")
	if kind == abi.RequestTrailer {
		return h.requestTrailer
	}
	return h.responseTrailer
}

// kept are headers that a policy cannot change: the node makes them. It passes
// over changes of Content-Length, which a test should hear of too.
var kept = []string{
	"Host", "Connection", "Content-Length", "Http2-Settings", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization",
	"Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

func (h *host) mutable(kind uint32, name string) http.Header {
	if kind == abi.RequestHeader || kind == abi.RequestTrailer {
		h.beforeNext(name)
	} else {
		h.responseMutable(name)
	}
	if slices.Contains(kept, http.CanonicalHeaderKey(name)) {
		panic("sdktest: the node does not let a policy change " + name)
	}
	return h.header(kind)
}

func checkValue(value string) {
	if strings.ContainsAny(value, "\r\n\x00") {
		panic("sdktest: a header's value is one line")
	}
}

func putAll(buf []byte, texts []string) uint64 {
	var all string
	for _, t := range texts {
		all += t + "\x00"
	}
	return uint64(len(texts))<<32 | uint64(put(buf, all))
}

func (h *host) GetHeaderNames(kind uint32, buf []byte) uint64 {
	var names []string
	for name := range h.header(kind) {
		names = append(names, strings.ToLower(name))
	}
	slices.Sort(names)
	return putAll(buf, names)
}

func (h *host) GetHeaderValues(kind uint32, name string, buf []byte) uint64 {
	return putAll(buf, h.header(kind).Values(name))
}

func (h *host) SetHeaderValue(kind uint32, name, value string) {
	checkValue(value)
	h.mutable(kind, name).Set(name, value)
}

func (h *host) AddHeaderValue(kind uint32, name, value string) {
	checkValue(value)
	h.mutable(kind, name).Add(name, value)
}

func (h *host) RemoveHeader(kind uint32, name string) { h.mutable(kind, name).Del(name) }

func (h *host) ReadBody(kind uint32, buf []byte) uint64 {
	if len(buf) == 0 {
		panic("sdktest: reading into nothing")
	}
	if kind == abi.ResponseBody {
		h.need(abi.BufferResponse, "reading the response's body")
	} else {
		h.beforeNext("the request's body")
	}
	limit := h.policy.MaxBody
	if limit == 0 {
		limit = 1 << 20
	}
	if len(h.came[kind]) > limit {
		h.Deny("the body is too large for a policy that reads it")
		return abi.EOF
	}
	n := copy(buf, h.came[kind][h.read[kind]:])
	h.read[kind] += n
	if h.read[kind] == len(h.came[kind]) {
		return abi.EOF | uint64(n)
	}
	return uint64(n)
}

func (h *host) WriteBody(kind uint32, body []byte) {
	if kind == abi.ResponseBody {
		h.responseMutable("the response's body")
	} else {
		h.beforeNext("the request's body")
	}
	if h.written[kind] == nil {
		h.written[kind] = &bytes.Buffer{}
	}
	h.written[kind].Write(body)
}

// requestBody is what goes upstream: without buffering, what was read is gone.
func (h *host) requestBody() []byte {
	switch {
	case h.written[abi.RequestBody] != nil:
		return h.written[abi.RequestBody].Bytes()
	case h.features&abi.BufferRequest != 0:
		return h.came[abi.RequestBody]
	}
	return h.came[abi.RequestBody][h.read[abi.RequestBody]:]
}

func (h *host) Sandbox(buf []byte) int32 {
	text, err := json.Marshal(h.policy.Sandbox)
	if err != nil {
		panic(err)
	}
	return int32(put(buf, string(text)))
}

func (h *host) HostName(buf []byte) int32 { return int32(put(buf, h.url.Hostname())) }

func (h *host) Deny(reason string) {
	if !h.denied {
		h.denied, h.reason = true, reason
	}
}

func (h *host) AuditNote(note string) {
	if len(h.notes) < 8 {
		h.notes = append(h.notes, note[:min(len(note), 256)])
	}
}

func (h *host) Now() int64 { return h.policy.Now.UnixNano() }

func (h *host) KVGet(key string, buf []byte) int32 {
	value, ok := h.policy.kv.get(key, h.policy.Now)
	if !ok {
		return abi.NotFound
	}
	return int32(put(buf, string(value)))
}

func (h *host) KVSet(key string, value []byte, ttl int64) int32 {
	return h.policy.kv.set(key, value, ttl, h.policy.Now)
}

func (h *host) KVAdd(key string, delta, ttl int64, out *[8]byte) int32 {
	sum, code := h.policy.kv.add(key, delta, ttl, h.policy.Now)
	binary.LittleEndian.PutUint64(out[:], uint64(sum))
	return code
}
