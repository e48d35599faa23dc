//go:build !wasip1

package sdktest

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// Limits of the node.
const (
	maxBody        = 1 << 20 // bytes of a request or response in memory
	maxURI         = 16 << 10
	maxMethod      = 64
	maxFields      = 256 // per header
	maxHeaderBytes = 64 << 10
	maxReason      = 512
	maxNotes       = 8
	maxNote        = 256
	maxLine        = 1 << 10 // bytes of a log line
)

const allFeatures = abi.BufferRequest | abi.BufferResponse | abi.Trailers | abi.RequestOnly

type phase int

const (
	starting phase = iota
	beforeNext
	afterNext
)

// host is the node in one exchange. It panics if the node would end the policy.
type host struct {
	policy   *Policy
	phase    phase
	features uint32
	url      *url.URL

	method, protocol, uri string
	host                  string
	header, trailer       http.Header
	body                  requestBody
	own                   message  // the policy's own response, instead of the upstream's
	upstream              *message // the upstream's response
	buffered              bool     // the policy may change the upstream's response

	references references
	signs      int
	sent       Result
	denied     bool
	reason     string
	notes      []string
	log        []string
}

var _ abi.Host = (*host)(nil)

// requestBody is the body of the request as the policy sees it.
type requestBody struct {
	original []byte
	read     int
	consumed bool   // read without BufferRequest, and not stored
	written  []byte // sent instead; nil: the original
}

// message is a response that a policy reads and writes.
type message struct {
	status          int
	header, trailer http.Header
	body            []byte
	read            int
	written         bool // the policy wrote the body in its current function
}

// fail panics, in place of the node, which stops a policy that violates the ABI.
func fail(format string, args ...any) {
	panic("sdktest: the node stops the policy: " + fmt.Sprintf(format, args...))
}

// refusal stops the policy for a reason that is not its mistake: a message or a secret.
type refusal struct{ reason string }

func refuse(format string, args ...any) { panic(refusal{fmt.Sprintf(format, args...)}) }

func refuseLength(format string, args ...any) {
	refuse("the policy was stopped: "+format, args...)
}

// stopping calls f, and denies the exchange if it ends with a refusal.
func (h *host) stopping(f func()) {
	defer func() {
		switch reason := recover().(type) {
		case nil:
		case refusal:
			h.denied, h.reason = true, reason.reason
		default:
			panic(reason)
		}
	}()
	f()
}

func newHost(p *Policy, r *http.Request) *host {
	h := &host{
		policy: p, phase: beforeNext, features: p.features, url: r.URL,
		method: r.Method, protocol: r.Proto, uri: r.URL.RequestURI(),
		host: cmp.Or(r.Host, r.URL.Host), header: r.Header.Clone(), trailer: r.Trailer.Clone(),
		own: message{header: http.Header{}, trailer: http.Header{}},
	}
	h.header.Del("Host")
	if h.trailer == nil {
		h.trailer = http.Header{}
	}
	if r.Body != nil {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(err)
		}
		h.body.original = body
		if r.ContentLength > 0 {
			h.header.Set("Content-Length", fmt.Sprint(r.ContentLength))
		}
	}
	return h
}

// put returns text from a function of the ABI: it copies the text to buf if it fits, and
// returns its length.
func put(buf []byte, text string) uint32 {
	if len(text) <= len(buf) {
		copy(buf, text)
	}
	return uint32(len(text))
}

// printable returns text as the node stores it: a single line of at most limit bytes.
func printable(s string, limit int) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, strings.ToValidUTF8(s, "\uFFFD"))
	if s = strings.TrimSpace(s); len(s) <= limit {
		return s
	}
	for limit > 0 && !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit]
}

func (h *host) inExchange() {
	if h.phase == starting {
		fail("it accessed a request while it was starting")
	}
}

// beforeNext fails if the request was already sent.
func (h *host) beforeNext(what string) {
	if h.inExchange(); h.phase != beforeNext {
		fail("it %s after the request was sent", what)
	}
}

// responseOf returns the response that the policy works on: its own before the request is
// sent, and then the upstream's, if it is buffered for the policy.
func (h *host) responseOf(what string) *message {
	switch h.inExchange(); {
	case h.phase == beforeNext:
		return &h.own
	case h.buffered:
		return h.upstream
	}
	fail("it %s after the response was sent, without BufferResponse in sdk.Policy.Features", what)
	return nil
}

func (h *host) maxBody() int { return cmp.Or(h.policy.MaxBody, maxBody) }

func (h *host) EnableFeatures(features uint32) uint32 {
	if h.phase == afterNext {
		fail("it enabled features after the request was sent")
	}
	h.features |= features & allFeatures
	return h.features
}

func (h *host) GetConfig(buf []byte) uint32 { return put(buf, h.policy.config) }

func (h *host) LogEnabled(level int32) bool { return level >= abi.Debug && level <= abi.Error }

func (h *host) Log(level int32, message string) {
	if level >= abi.Debug && level <= abi.Error {
		h.log = append(h.log, printable(message[:min(len(message), maxLine)], maxLine))
	}
}

// text returns a text of the exchange.
func (h *host) text(buf []byte, text string) uint32 {
	h.inExchange()
	return put(buf, text)
}

func (h *host) GetMethod(buf []byte) uint32          { return h.text(buf, h.method) }
func (h *host) GetURI(buf []byte) uint32             { return h.text(buf, h.uri) }
func (h *host) HostName(buf []byte) int32            { return int32(h.text(buf, h.url.Hostname())) }
func (h *host) GetProtocolVersion(buf []byte) uint32 { return h.text(buf, h.protocol) }

func (h *host) GetStatusCode() uint32 {
	return uint32(cmp.Or(h.responseOf("reads the status").status, http.StatusOK))
}

func (h *host) SetMethod(method string) {
	h.beforeNext("sets the method")
	if !isToken(method) || len(method) > maxMethod || method == http.MethodConnect {
		fail("%.40q is not a method that a policy can set", method)
	}
	h.method = method
}

func (h *host) SetURI(uri string) {
	h.beforeNext("sets the URI")
	uri = cmp.Or(uri, "/")
	if len(uri) > maxURI {
		fail("its URI has more than %d bytes", maxURI)
	}
	if uri[0] != '/' || strings.ContainsFunc(uri, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '#' }) {
		fail("%.80q is not a path with a query: it begins with a slash, and has no spaces, no # and nothing beyond ASCII", uri)
	}
	path, _, _ := strings.Cut(uri, "?")
	if _, err := url.PathUnescape(path); err != nil {
		fail("%.80q is not a path: %v", path, err)
	}
	h.uri = uri
}

func (h *host) SetStatusCode(code uint32) {
	if code < 200 || code > 999 {
		fail("%d is not a status of a response", code)
	}
	h.responseOf("sets the status").status = int(code)
}

// fields returns the header or trailer of a kind. change is true if the policy modifies it.
func (h *host) fields(kind uint32, change bool) http.Header {
	h.inExchange()
	switch kind {
	case abi.RequestHeader, abi.RequestTrailer:
		if change {
			h.beforeNext("changes the request's header or trailer")
		}
		if kind == abi.RequestHeader {
			return h.header
		}
		return h.trailer
	case abi.ResponseHeader, abi.ResponseTrailer:
		response := h.upstream
		if h.phase != afterNext || h.buffered || change {
			response = h.responseOf("changes the response's header or trailer")
		}
		if kind == abi.ResponseHeader {
			return response.header
		}
		return response.trailer
	}
	fail("unknown kind of header: %d", kind)
	return nil
}

// reserved are the headers that only the node sets.
var reserved = []string{
	"Host", "Connection", "Http2-Settings", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization",
	"Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// canonical returns a header's name in the form of http.Header.
func canonical(name string) string {
	if len(name) > maxHeaderBytes || !isToken(name) {
		fail("%.40q is not a name of a header", name)
	}
	return http.CanonicalHeaderKey(name)
}

// mutable reports whether a policy may change a header. The node computes
// Content-Length, and ignores changes of it.
func mutable(key string) bool {
	if slices.Contains(reserved, key) {
		fail("it changes header %s, which is the node's", key)
	}
	return key != "Content-Length"
}

func (h *host) SetHeaderValue(kind uint32, name, value string) {
	h.RemoveHeader(kind, name)
	h.AddHeaderValue(kind, name, value)
}

func (h *host) AddHeaderValue(kind uint32, name, value string) {
	header, key := h.fields(kind, true), canonical(name)
	if !mutable(key) {
		return
	}
	if strings.ContainsFunc(value, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
		fail("its value of header %.40q holds a line break or another control character", key)
	}
	header[key] = append(header[key], value)
	fields, bytes := 0, 0
	for key, values := range header {
		for _, v := range values {
			fields++
			bytes += len(key) + len(v)
		}
	}
	if fields > maxFields || bytes > maxHeaderBytes {
		fail("a header has more than %d fields or %d bytes", maxFields, maxHeaderBytes)
	}
}

// tokenCharacters are the characters of methods and names of headers (RFC 9110, section
// 5.6.2).
const tokenCharacters = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

func isToken(s string) bool { return s != "" && strings.Trim(s, tokenCharacters) == "" }

func putAll(buf []byte, texts []string) uint64 {
	var all string
	for _, t := range texts {
		all += t + "\x00"
	}
	return uint64(len(texts))<<32 | uint64(put(buf, all))
}

func (h *host) GetHeaderNames(kind uint32, buf []byte) uint64 {
	header := h.fields(kind, false)
	var names []string
	for name, values := range header {
		if len(values) > 0 {
			names = append(names, strings.ToLower(name))
		}
	}
	if kind == abi.RequestHeader {
		names = append(names, "host")
	}
	slices.Sort(names)
	return putAll(buf, names)
}

func (h *host) GetHeaderValues(kind uint32, name string, buf []byte) uint64 {
	header := h.fields(kind, false)
	if kind == abi.RequestHeader && strings.EqualFold(name, "Host") {
		return putAll(buf, []string{h.host})
	}
	return putAll(buf, header.Values(name))
}

func (h *host) RemoveHeader(kind uint32, name string) {
	header, key := h.fields(kind, true), canonical(name)
	if mutable(key) {
		delete(header, key)
	}
}

func (h *host) ReadBody(kind uint32, buf []byte) uint64 {
	h.inExchange()
	if len(buf) == 0 {
		fail("it reads a body into no memory at all")
	}
	switch kind {
	case abi.RequestBody:
		return h.readRequest(buf)
	case abi.ResponseBody:
		a := h.responseOf("reads the response's body")
		return next(a.body, &a.read, buf)
	}
	fail("unknown kind of body: %d", kind)
	return 0
}

// next copies the next bytes of a body to buf, and returns the result of read_body.
func next(body []byte, read *int, buf []byte) uint64 {
	n := copy(buf, body[*read:])
	if *read += n; *read == len(body) {
		return abi.EOF | uint64(n)
	}
	return uint64(n)
}

func (h *host) readRequest(buf []byte) uint64 {
	if h.features&abi.BufferRequest == 0 {
		if h.phase != beforeNext {
			fail("it reads the request's body after the request was sent, without BufferRequest in sdk.Policy.Features")
		}
		h.body.consumed = true
	} else if limit := h.maxBody(); len(h.body.original) > limit {
		refuseLength("it reads or writes the whole body of the request, which has more than %d bytes", limit)
	}
	return next(h.body.original, &h.body.read, buf)
}

func (h *host) WriteBody(kind uint32, body []byte) {
	switch kind {
	case abi.RequestBody:
		h.beforeNext("writes the request's body")
		if len(h.body.written)+len(body) > h.maxBody() {
			refuseLength("it reads or writes the whole body of the request, which has more than %d bytes", h.maxBody())
		}
		h.body.written = append(append([]byte{}, h.body.written...), body...)
	case abi.ResponseBody:
		a := h.responseOf("writes the response's body")
		if !a.written {
			a.body, a.written, a.read = nil, true, 0
		}
		if len(a.body)+len(body) > h.maxBody() {
			refuseLength("it writes more than %d bytes of a response", h.maxBody())
		}
		a.body = append(a.body, body...)
	default:
		fail("unknown kind of body: %d", kind)
	}
}

// requestBody returns the body that is sent upstream.
func (h *host) requestBody() []byte {
	switch {
	case h.body.written != nil:
		if h.header.Get("Content-Length") != "" {
			h.header.Set("Content-Length", strconv.Itoa(len(h.body.written)))
		}
		return h.body.written
	case h.body.consumed:
		fail("it read the request's body without BufferRequest in sdk.Policy.Features, and then passed the request on without it")
	}
	return h.body.original
}

func (h *host) Sandbox(buf []byte) int32 {
	text, _ := json.Marshal(h.policy.Sandbox) // strings only
	return int32(h.text(buf, string(text)))
}

func (h *host) Deny(reason string) {
	if h.inExchange(); !h.denied {
		h.denied, h.reason = true, cmp.Or(printable(reason[:min(len(reason), 2*maxReason)], maxReason), "denied by a policy")
	}
}

func (h *host) AuditNote(note string) {
	if h.inExchange(); len(h.notes) < maxNotes {
		h.notes = append(h.notes, printable(note[:min(len(note), 2*maxNote)], maxNote))
	}
}

func (h *host) Now() int64 { return h.policy.Now.UnixNano() }

func (h *host) KVGet(key string, buf []byte) int32 {
	h.inExchange()
	value, ok := h.policy.kv.get(key, h.policy.Now)
	if !ok {
		return abi.NotFound
	}
	return int32(put(buf, string(value)))
}

func (h *host) KVSet(key string, value []byte, ttl int64) int32 {
	h.inExchange()
	return h.policy.kv.set(key, value, ttl, h.policy.Now)
}

func (h *host) KVAdd(key string, delta, ttl int64, out *[8]byte) int32 {
	h.inExchange()
	sum, code := h.policy.kv.add(key, delta, ttl, h.policy.Now)
	if code == 0 {
		binary.LittleEndian.PutUint64(out[:], uint64(sum))
	}
	return code
}
