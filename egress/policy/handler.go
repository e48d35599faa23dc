package policy

import (
	"cmp"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strings"

	"github.com/tetratelabs/wazero/api"
	"golang.org/x/net/http/httpguts"
)

// Kinds of headers and bodies, as guests number them.
const (
	requestHeader   = 0
	responseHeader  = 1
	requestTrailer  = 2
	responseTrailer = 3

	requestBody  = 0
	responseBody = 1
)

// maxURI bounds the URI that a policy may set. Servers and proxies commonly accept 8 KiB;
// a URI may become longer when references are rendered.
const maxURI = 16 << 10

// maxMethod bounds a method. The longest registered method has 17 characters.
const maxMethod = 64

// handlerFunctions are the module http_handler.
var handlerFunctions = []function{
	{"enable_features", params(1), params(1), func(c *call, s []uint64) {
		if c.phase == afterNext {
			fail("it enabled features after the request was sent")
		}
		c.features |= uint32(s[0]) & allFeatures
		s[0] = uint64(c.features)
	}},
	{"get_config", params(2), params(1), func(c *call, s []uint64) {
		s[0] = write(c, c.instance.policy.config, s[0], s[1])
	}},
	{"log_enabled", params(1), params(1), func(c *call, s []uint64) {
		level, ok := levels[int32(s[0])]
		if s[0] = 0; ok && c.instance.policy.logger.enabled(level) {
			s[0] = 1
		}
	}},
	{"log", params(3), nil, func(c *call, s []uint64) { c.log(int32(s[0]), c.bytes(s[1], s[2])) }},
	textFunction("get_method", func(c *call) string { return c.r.Method }),
	{"set_method", params(2), nil, func(c *call, s []uint64) { c.setMethod(c.string(s[0], s[1], maxMethod)) }},
	textFunction("get_uri", func(c *call) string { return c.r.URL.RequestURI() }),
	{"set_uri", params(2), nil, func(c *call, s []uint64) { c.setURI(c.string(s[0], s[1], maxURI)) }},
	textFunction("get_protocol_version", func(c *call) string { return c.r.Proto }),
	textFunction("get_source_addr", func(c *call) string { return c.r.RemoteAddr }),
	{"get_header_names", params(3), []api.ValueType{i64}, func(c *call, s []uint64) {
		c.tick() // sorting
		s[0] = c.writeList(c.names(uint32(s[0])), s[1], s[2])
	}},
	{"get_header_values", params(5), []api.ValueType{i64}, func(c *call, s []uint64) {
		s[0] = c.writeList(c.values(uint32(s[0]), c.string(s[1], s[2], maxHeaderBytes)), s[3], s[4])
	}},
	{"set_header_value", params(5), nil, func(c *call, s []uint64) { c.changeHeader(s, false) }},
	{"add_header_value", params(5), nil, func(c *call, s []uint64) { c.changeHeader(s, true) }},
	{"remove_header", params(3), nil, func(c *call, s []uint64) {
		h, w := c.fields(uint32(s[0]), true)
		w.remove(h, c.string(s[1], s[2], maxHeaderBytes))
	}},
	{"read_body", params(3), []api.ValueType{i64}, func(c *call, s []uint64) {
		c.tick()
		s[0] = c.readBody(uint32(s[0]), s[1], s[2])
	}},
	{"write_body", params(3), nil, func(c *call, s []uint64) {
		c.tick()
		c.writeBody(uint32(s[0]), c.bytes(s[1], s[2]))
	}},
	{"get_status_code", nil, params(1), func(c *call, s []uint64) { s[0] = uint64(c.currentResponse("reads the status").statusCode()) }},
	{"set_status_code", params(1), nil, func(c *call, s []uint64) {
		status := uint32(s[0])
		if status < 200 || status > 999 {
			fail("%d is not a status of a response", status)
		}
		c.currentResponse("sets the status").status = int(status)
	}},
}

// textFunction returns a function that writes a text of the exchange to the guest's memory.
func textFunction[T string | []byte](name string, text func(*call) T) function {
	return function{name, params(2), params(1), func(c *call, s []uint64) {
		c.inExchange()
		s[0] = write(c, text(c), s[0], s[1])
	}}
}

// levels of a log, as guests number them; 3 is none.
var levels = map[int32]slog.Level{-1: slog.LevelDebug, 0: slog.LevelInfo, 1: slog.LevelWarn, 2: slog.LevelError}

func (c *call) log(level int32, text []byte) {
	if l, ok := levels[level]; ok {
		c.instance.output.log(l, printable(string(text[:min(len(text), maxLine)]), maxLine), c.chain)
	}
}

func (c *call) beforeNext(what string) {
	c.inExchange()
	if c.phase != beforeNext {
		fail("it %s after the request was sent", what)
	}
}

func (c *call) setMethod(method string) {
	c.beforeNext("sets the method")
	if !httpguts.ValidHeaderFieldName(method) || len(method) > maxMethod || method == http.MethodConnect { // both are tokens
		fail("%.40q is not a method that a policy can set", method)
	}
	c.r.Method = method
}

// setURI changes the path and query. The request's destination does not change.
func (c *call) setURI(s string) {
	c.beforeNext("sets the URI")
	s = cmp.Or(s, "/")
	if len(s) > maxURI {
		fail("its URI has more than %d bytes", maxURI)
	}
	if s[0] != '/' || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == '#' }) {
		fail("%.80q is not a path with a query: it begins with a slash, and has no spaces, no # and nothing beyond ASCII", s)
	}
	path, query, found := strings.Cut(s, "?")
	plain, err := url.PathUnescape(path)
	if err != nil {
		fail("%.80q is not a path: %v", path, err)
	}
	u := c.r.URL
	u.Opaque, u.Path, u.RawPath = "", plain, path
	u.RawQuery, u.ForceQuery = query, found && query == ""
	c.r.RequestURI = s
}

// changeHeader sets or adds a field.
func (c *call) changeHeader(s []uint64, add bool) {
	h, w := c.fields(uint32(s[0]), true)
	w.change(h, c.string(s[1], s[2], maxHeaderBytes), c.string(s[3], s[4], maxHeaderBytes), add)
}

// fields returns the header or trailer of a kind, and its limits. change is true if the
// guest modifies it.
func (c *call) fields(kind uint32, change bool) (http.Header, *weight) {
	c.inExchange()
	var header *http.Header
	switch kind {
	case requestHeader, requestTrailer:
		if change {
			c.beforeNext("changes the request's header or trailer")
		}
		if header = &c.r.Header; kind == requestTrailer {
			header = &c.r.Trailer
		}
	case responseHeader, responseTrailer:
		if c.phase == afterNext && c.buffer == nil && !change {
			if kind == responseTrailer {
				return trailersOf(c.writer.Header()), nil
			}
			return c.writer.Header(), nil
		}
		r := c.currentResponse("changes the response's header or trailer")
		if header = &r.header; kind == responseTrailer {
			header = &r.trailer
		}
	default:
		fail("unknown kind of header: %d", kind)
	}
	if *header == nil && change {
		*header = http.Header{}
	}
	return *header, &c.weights[kind]
}

// trailersOf returns the trailers in the header of a response that was sent.
func trailersOf(h http.Header) http.Header {
	t := http.Header{}
	for key, values := range h {
		if name, ok := strings.CutPrefix(key, http.TrailerPrefix); ok {
			t[name] = values
		}
	}
	return t
}

// currentResponse returns the response that the guest works on: its own before the request is
// sent, and then the upstream's, if it is buffered for the guest.
func (c *call) currentResponse(what string) *response {
	c.inExchange()
	switch {
	case c.phase == beforeNext:
		return &c.own
	case c.buffer != nil:
		return &c.buffer.response
	}
	fail("it %s after the response was sent, without having enabled buffer_response", what)
	return nil
}

func (a *response) statusCode() int { return cmp.Or(a.status, http.StatusOK) }

func (c *call) names(kind uint32) []string {
	h, _ := c.fields(kind, false)
	if kind == requestHeader && c.r.Host != "" {
		return names(h, "host")
	}
	return names(h)
}

// values returns the values of a header field. An invalid name has no values, as in the
// reference host: guests pass names from their configurations.
func (c *call) values(kind uint32, name string) []string {
	h, _ := c.fields(kind, false)
	if !isName(name) {
		return nil
	}
	key := canonical(name)
	if kind == requestHeader && key == "Host" {
		return []string{c.r.Host}
	}
	return h[key]
}

const end = 1 << 32 // bit in the result of read_body: the body has ended

func (c *call) readBody(kind uint32, at, limit uint64) uint64 {
	c.inExchange()
	b := c.bytes(at, limit)
	if len(b) == 0 {
		fail("it reads a body into no memory at all")
	}
	switch kind {
	case requestBody:
		n, err := c.readRequest(b)
		switch err {
		case nil:
			return uint64(n)
		case io.EOF:
			return end | uint64(n)
		}
		unreadable(err)
	case responseBody:
		n, ended := c.currentResponse("reads the response's body").next(b)
		if ended {
			return end | uint64(n)
		}
		return uint64(n)
	}
	fail("unknown kind of body: %d", kind)
	return 0
}

func (c *call) writeBody(kind uint32, b []byte) {
	switch kind {
	case requestBody:
		c.beforeNext("writes the request's body")
		c.writeRequest(b)
	case responseBody:
		r := c.currentResponse("writes the response's body")
		if c.phase == beforeNext { // later, Config.InstancesInAll bounds responses
			c.chain.hold(len(b))
		}
		r.write(b, c.instance.policy.host.config.ResponseLimit)
	default:
		fail("unknown kind of body: %d", kind)
	}
}
