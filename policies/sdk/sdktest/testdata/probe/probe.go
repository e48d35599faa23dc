// Package probe is a table of valid and invalid calls of policies to their host, with the
// expected outcomes. Tests run it twice: on the node's own host, as WebAssembly,
// and natively on package sdktest, so that the two cannot differ.
package probe

import (
	"encoding/binary"
	"errors"
	"strconv"
	"strings"

	"github.com/doze-run/doze/policies/sdk"
	"github.com/doze-run/doze/policies/sdk/internal/abi"
)

// Probe is a test case.
type Probe struct {
	Name     string
	Method   string // POST
	Body     string // of the request
	Features sdk.Features
	// Start runs when an instance starts.
	Start func()
	// Request records its results with sdk.Note.
	Request  func(*sdk.Request) error
	Response func(*sdk.Response) error

	// Want is the outcome of the request: allow, respond, deny, error, or invalid
	// for an instance that does not start.
	Want string
	// Reason is the reason of a denial.
	Reason string
	Notes  []string
	// Sent is the "METHOD URI" and SentBody the body of the request that is sent.
	Sent, SentBody string
	// Got is the status and body of the response, such as "200 ok".
	Got string
	// Headers are headers of the request that is sent, and GotHeaders headers of the
	// response; "" means that the header is absent.
	Headers, GotHeaders map[string]string
}

// The upstream of all probes responds 200 with this body and header.
const (
	UpstreamBody   = "from upstream"
	UpstreamHeader = "X-Upstream"
	URL            = "https://api.example.com/path?query=1"
)

// Secrets are the secrets of all probes, by name.
var Secrets = map[string]string{"token": "s3cret/value", "line": "two\nlines"}

type config struct {
	Probe string `json:"probe"`
}

// Build is the argument of sdk.Serve.
func Build(c config) (sdk.Policy, error) {
	for _, p := range All {
		if p.Name != c.Probe {
			continue
		}
		if p.Start != nil {
			p.Start()
		}
		return sdk.Policy{Request: p.Request, Response: p.Response, Features: p.Features}, nil
	}
	return sdk.Policy{}, errors.New("no such probe")
}

// Texts of certain lengths.
var (
	long64K = strings.Repeat("x", 64<<10)
	long1M  = strings.Repeat("x", 1<<20)
)

// pass returns a Request function that calls f and forwards the request.
func pass(f func()) func(*sdk.Request) error {
	return func(*sdk.Request) error {
		f()
		return nil
	}
}

// after returns a Response function that calls f.
func after(f func()) func(*sdk.Response) error {
	return func(*sdk.Response) error {
		f()
		return nil
	}
}

func letPass(*sdk.Request) error { return nil }

// noteCode notes the result of a function of doze_egress_v1: an error code, or that it
// returned a value.
func noteCode(code int32) {
	if code >= 0 {
		sdk.Note("ok")
		return
	}
	sdk.Note(strconv.Itoa(int(code)))
}

var (
	buf  [1 << 10]byte
	some = buf[:]
)

// parts returns the encoded parts of an HMAC.
func parts(n, size int) []byte {
	var list []byte
	for range n {
		list = binary.LittleEndian.AppendUint32(list, uint32(size))
		list = append(list, make([]byte, size)...)
	}
	return list
}

func ref(name string) string {
	var b [64]byte
	return string(b[:abi.SecretRef(name, b[:])])
}

// All lists all probes.
var All = []Probe{
	// Bodies of requests.
	{Name: "read the body, buffered", Body: "hello", Features: sdk.BufferRequest, Want: "allow", SentBody: "hello",
		Request: pass(func() { abi.ReadBody(abi.RequestBody, some) })},
	{Name: "read the body, not buffered", Body: "hello", Want: "error", Request: pass(func() { abi.ReadBody(abi.RequestBody, some) })},
	{Name: "read a part of the body, not buffered", Body: "hello", Want: "error", Request: pass(func() { abi.ReadBody(abi.RequestBody, some[:2]) })},
	{Name: "read the body, not buffered, and write another", Body: "hello", Want: "allow", SentBody: "bye",
		Request: pass(func() {
			abi.ReadBody(abi.RequestBody, some)
			abi.WriteBody(abi.RequestBody, []byte("b"))
			abi.WriteBody(abi.RequestBody, []byte("ye"))
		})},
	{Name: "read the body, not buffered, and answer", Body: "hello", Want: "respond", Got: "418 tea",
		Request: func(r *sdk.Request) error {
			abi.ReadBody(abi.RequestBody, some)
			return r.Respond(418, "", []byte("tea"))
		}},
	{Name: "buffer a body of 1 MiB", Body: long1M, Features: sdk.BufferRequest, Want: "allow", Request: pass(func() { abi.ReadBody(abi.RequestBody, some) })},
	{Name: "buffer a body of more than 1 MiB", Body: long1M + "x", Features: sdk.BufferRequest, Want: "error",
		Request: pass(func() { abi.ReadBody(abi.RequestBody, some) })},
	{Name: "a body of more than 1 MiB that is not read", Body: long1M + "x", Features: sdk.BufferRequest, Want: "allow", Request: letPass},
	{Name: "read into no memory", Body: "hello", Features: sdk.BufferRequest, Want: "error", Request: pass(func() { abi.ReadBody(abi.RequestBody, nil) })},
	{Name: "read a body of another kind", Want: "error", Request: pass(func() { abi.ReadBody(2, some) })},
	{Name: "write a body of another kind", Want: "error", Request: pass(func() { abi.WriteBody(2, []byte("x")) })},
	{Name: "write a body of 1 MiB", Want: "allow", SentBody: long1M, Request: pass(func() { abi.WriteBody(abi.RequestBody, []byte(long1M)) })},
	{Name: "write a body of more than 1 MiB", Want: "error", Request: pass(func() {
		abi.WriteBody(abi.RequestBody, []byte(long1M))
		abi.WriteBody(abi.RequestBody, []byte("x"))
	})},
	{Name: "write no body", Body: "hello", Want: "allow", SentBody: "", Request: pass(func() { abi.WriteBody(abi.RequestBody, nil) })},
	{Name: "write the request's body after it was sent", Request: letPass, Want: "error", Response: after(func() { abi.WriteBody(abi.RequestBody, []byte("x")) })},
	{Name: "read the request's body after it was sent", Request: letPass, Want: "error", Response: after(func() { abi.ReadBody(abi.RequestBody, some) })},

	// The log.
	{Name: "ask for each level of the log", Want: "allow", Notes: []string{"-2 false", "-1 true", "0 true", "1 true", "2 true", "3 false"}, Request: pass(func() {
		for level := int32(-2); level <= 3; level++ {
			sdk.Note(strconv.Itoa(int(level)) + " " + strconv.FormatBool(abi.LogEnabled(level)))
		}
	})},

	// Responses.
	{Name: "change the response, not buffered", Request: letPass, Want: "error", Response: after(func() { abi.SetHeaderValue(abi.ResponseHeader, "X-A", "b") })},
	{Name: "remove a header of the response, not buffered", Request: letPass, Want: "error", Response: after(func() { abi.RemoveHeader(abi.ResponseHeader, "X-A") })},
	{Name: "set the status, not buffered", Request: letPass, Want: "error", Response: after(func() { abi.SetStatusCode(418) })},
	{Name: "read the status, not buffered", Request: letPass, Want: "error", Response: after(func() { abi.GetStatusCode() })},
	{Name: "read the response's body, not buffered", Request: letPass, Want: "error", Response: after(func() { abi.ReadBody(abi.ResponseBody, some) })},
	{Name: "write the response's body, not buffered", Request: letPass, Want: "error", Response: after(func() { abi.WriteBody(abi.ResponseBody, []byte("x")) })},
	{Name: "read the response's header, not buffered", Request: letPass, Want: "allow", Notes: []string{"yes"},
		Response: func(r *sdk.Response) error { sdk.Note(r.Header.Get(UpstreamHeader)); return nil }},
	{Name: "change the response, buffered", Features: sdk.BufferResponse, Request: letPass, Want: "allow", Got: "418 tea", GotHeaders: map[string]string{"X-A": "b", UpstreamHeader: ""},
		Notes: []string{"200", UpstreamBody},
		Response: after(func() {
			sdk.Note(strconv.Itoa(int(abi.GetStatusCode())))
			n := abi.ReadBody(abi.ResponseBody, some)
			sdk.Note(string(some[:uint32(n)]))
			abi.SetStatusCode(418)
			abi.WriteBody(abi.ResponseBody, []byte("tea"))
			abi.SetHeaderValue(abi.ResponseHeader, "X-A", "b")
			abi.RemoveHeader(abi.ResponseHeader, UpstreamHeader)
		})},
	{Name: "write a response of more than 1 MiB", Want: "error", Request: pass(func() {
		abi.WriteBody(abi.ResponseBody, []byte(long1M))
		abi.WriteBody(abi.ResponseBody, []byte("x"))
	})},
	{Name: "write a response, and let the request pass", Want: "allow", Got: "200 first, " + UpstreamBody, Request: pass(func() {
		abi.SetStatusCode(418)
		abi.WriteBody(abi.ResponseBody, []byte("first, "))
	})},
	{Name: "headers of the response are defaults", Want: "allow", GotHeaders: map[string]string{"X-A": "b", UpstreamHeader: "yes"}, Request: pass(func() {
		abi.SetHeaderValue(abi.ResponseHeader, "X-A", "b")
		abi.SetHeaderValue(abi.ResponseHeader, UpstreamHeader, "no")
	})},
	{Name: "status 199", Want: "error", Request: pass(func() { abi.SetStatusCode(199) })},
	{Name: "status 1000", Want: "error", Request: pass(func() { abi.SetStatusCode(1000) })},
	{Name: "status 0", Want: "error", Request: func(r *sdk.Request) error { return r.Respond(0, "", nil) }},
	{Name: "answer without anything", Want: "respond", Got: "204 ", Request: func(r *sdk.Request) error { return r.Respond(204, "", nil) }},

	// The request's line.
	{Name: "a method", Want: "allow", Sent: "PATCH /path?query=1", Request: pass(func() { abi.SetMethod("PATCH") })},
	{Name: "method CONNECT", Want: "error", Request: pass(func() { abi.SetMethod("CONNECT") })},
	{Name: "a method with a space", Want: "error", Request: pass(func() { abi.SetMethod("GET /") })},
	{Name: "no method", Want: "error", Request: pass(func() { abi.SetMethod("") })},
	{Name: "a method of 64 bytes", Want: "allow", Request: pass(func() { abi.SetMethod(long64K[:64]) })},
	{Name: "a method of 65 bytes", Want: "error", Request: pass(func() { abi.SetMethod(long64K[:65]) })},
	{Name: "the method after the request was sent", Request: letPass, Want: "error", Response: after(func() { abi.SetMethod("GET") })},
	{Name: "a URI", Want: "allow", Sent: "POST /a%20b?c=%2F", Request: pass(func() { abi.SetURI("/a%20b?c=%2F") })},
	{Name: "no URI", Want: "allow", Sent: "POST /", Request: pass(func() { abi.SetURI("") })},
	{Name: "a URI without a slash", Want: "error", Request: pass(func() { abi.SetURI("a") })},
	{Name: "a URI with a host", Want: "error", Request: pass(func() { abi.SetURI("https://other.example/") })},
	{Name: "a URI with a space", Want: "error", Request: pass(func() { abi.SetURI("/a b") })},
	{Name: "a URI with a fragment", Want: "error", Request: pass(func() { abi.SetURI("/a#b") })},
	{Name: "a URI beyond ASCII", Want: "error", Request: pass(func() { abi.SetURI("/ä") })},
	{Name: "a URI with a broken escape", Want: "error", Request: pass(func() { abi.SetURI("/%zz") })},
	{Name: "a URI of 16 KiB", Want: "allow", Request: pass(func() { abi.SetURI("/" + long64K[:16<<10-1]) })},
	{Name: "a URI of more than 16 KiB", Want: "error", Request: pass(func() { abi.SetURI("/" + long64K[:16<<10]) })},
	{Name: "the URI after the request was sent", Request: letPass, Want: "error", Response: after(func() { abi.SetURI("/") })},

	// Headers.
	{Name: "a header", Want: "allow", Headers: map[string]string{"X-A": "b, c", "X-B": ""}, Request: pass(func() {
		abi.SetHeaderValue(abi.RequestHeader, "x-a", "b")
		abi.AddHeaderValue(abi.RequestHeader, "X-A", "c")
		abi.SetHeaderValue(abi.RequestHeader, "X-B", "d")
		abi.RemoveHeader(abi.RequestHeader, "x-b")
	})},
	{Name: "a header's name with a space", Want: "error", Request: pass(func() { abi.SetHeaderValue(abi.RequestHeader, "X A", "b") })},
	{Name: "a header without a name", Want: "error", Request: pass(func() { abi.SetHeaderValue(abi.RequestHeader, "", "b") })},
	{Name: "a header's value with a line break", Want: "error", Request: pass(func() { abi.AddHeaderValue(abi.RequestHeader, "X-A", "b\r\nc: d") })},
	{Name: "a header's value with a control character", Want: "error", Request: pass(func() { abi.SetHeaderValue(abi.RequestHeader, "X-A", "b\x01") })},
	{Name: "a header's value with a tab, and beyond ASCII", Want: "allow", Headers: map[string]string{"X-A": "ä\tb"}, Request: pass(func() { abi.SetHeaderValue(abi.RequestHeader, "X-A", "ä\tb") })},
	{Name: "remove a header without a name", Want: "error", Request: pass(func() { abi.RemoveHeader(abi.RequestHeader, "") })},
	{Name: "header Host", Want: "error", Request: pass(func() { abi.SetHeaderValue(abi.RequestHeader, "host", "other.example") })},
	{Name: "header Connection", Want: "error", Request: pass(func() { abi.AddHeaderValue(abi.RequestHeader, "Connection", "x") })},
	{Name: "header Transfer-Encoding of an answer", Want: "error", Request: pass(func() { abi.SetHeaderValue(abi.ResponseHeader, "Transfer-Encoding", "x") })},
	{Name: "remove header Upgrade", Want: "error", Request: pass(func() { abi.RemoveHeader(abi.RequestHeader, "Upgrade") })},
	{Name: "header Content-Length", Body: "hello", Want: "allow", SentBody: "hello", Headers: map[string]string{"Content-Length": "5"}, Request: pass(func() { abi.SetHeaderValue(abi.RequestHeader, "Content-Length", "1") })},
	{Name: "a header of another kind", Want: "error", Request: pass(func() { abi.GetHeaderNames(4, some) })},
	{Name: "200 fields", Want: "allow", Request: pass(func() { fields(200, 1) })},
	{Name: "300 fields", Want: "error", Request: pass(func() { fields(300, 1) })},
	{Name: "63 KiB of fields", Want: "allow", Request: pass(func() { fields(63, 1000) })},
	{Name: "more than 64 KiB of fields", Want: "error", Request: pass(func() { fields(66, 1000) })},
	{Name: "the request's header after it was sent", Request: letPass, Want: "error", Response: after(func() { abi.SetHeaderValue(abi.RequestHeader, "X-A", "b") })},
	{Name: "read the host", Want: "allow", Notes: []string{"api.example.com", "api.example.com"}, Request: func(r *sdk.Request) error {
		sdk.Note(r.Header.Get("HOST"))
		host, err := sdk.Host()
		sdk.Note(host)
		return err
	}},

	// Features.
	{Name: "features that there are not", Want: "allow", Notes: []string{"4"}, Response: after(func() {}), Request: pass(func() { sdk.Note(strconv.Itoa(int(abi.EnableFeatures(1<<20 | abi.Trailers)))) })},
	{Name: "features after the request was sent", Request: letPass, Want: "error", Response: after(func() { abi.EnableFeatures(abi.BufferResponse) })},
	{Name: "features for one exchange", Want: "allow", Got: "200 x", Request: pass(func() { abi.EnableFeatures(abi.BufferResponse) }), Response: after(func() { abi.WriteBody(abi.ResponseBody, []byte("x")) })},

	// Secrets.
	{Name: "a reference", Want: "allow", Headers: map[string]string{"X-A": "s3cret/value"}, Request: pass(func() { abi.SetHeaderValue(abi.RequestHeader, "X-A", ref("token")) })},
	{Name: "a reference in the URI", Want: "allow", Sent: "POST /s3cret%2Fvalue?q=s3cret%2Fvalue", Request: pass(func() { abi.SetURI("/" + ref("token") + "?q=" + ref("token")) })},
	{Name: "a reference in the body", Want: "allow", SentBody: "<s3cret/value>", Request: pass(func() { abi.WriteBody(abi.RequestBody, []byte("<"+ref("token")+">")) })},
	{Name: "a reference in the method", Want: "error", Request: pass(func() { abi.SetMethod(ref("token")) })},
	{Name: "a reference in a header's name", Want: "error", Request: pass(func() { abi.SetHeaderValue(abi.RequestHeader, ref("token"), "b") })},
	{Name: "a part of a reference", Want: "error", Request: pass(func() { r := ref("token"); abi.SetHeaderValue(abi.RequestHeader, "X-A", r[:len(r)-1]) })},
	{Name: "a secret with a line break in a header", Want: "error", Request: pass(func() { abi.SetHeaderValue(abi.RequestHeader, "X-A", ref("line")) })},
	{Name: "encoded", Want: "allow", Headers: map[string]string{"X-A": "Basic dTpzM2NyZXQvdmFsdWU="}, Request: func(r *sdk.Request) error {
		text, err := sdk.Encode(sdk.Base64, "u:"+ref("token"))
		r.Header.Set("X-A", "Basic "+text)
		return err
	}},
	{Name: "names of secrets", Want: "allow", Notes: []string{"-1", "-3", "-3", "ok"}, Request: pass(func() {
		noteCode(abi.SecretRef("none", some))
		noteCode(abi.SecretRef("", some))
		noteCode(abi.SecretRef(long64K[:257], some))
		noteCode(abi.SecretRef("token", some))
	})},
	{Name: "65 references", Want: "allow", Notes: []string{"ok", "-4"}, Request: pass(func() {
		last := int32(0)
		for i := range 64 {
			last = abi.EncodeRef(abi.Hex, strconv.Itoa(i), some)
		}
		noteCode(last)
		noteCode(abi.EncodeRef(abi.Hex, "x", some))
	})},
	{Name: "encodings", Want: "allow", Notes: []string{"-3", "-3", "ok", "-3"}, Request: pass(func() {
		noteCode(abi.EncodeRef(4, "x", some))
		noteCode(abi.EncodeRef(abi.Hex, long64K+"x", some))
		noteCode(abi.EncodeRef(abi.Hex, long64K, some))
		r := ref("token")
		noteCode(abi.EncodeRef(abi.Hex, r[:len(r)-1], some))
	})},
	{Name: "HMACs", Want: "allow", Notes: []string{"-3", "-3", "-3", "-3", "-3", "-1", "ok"}, Request: pass(func() {
		noteCode(abi.HMACSHA256("token", "", nil, some))
		noteCode(abi.HMACSHA256("token", "", parts(17, 1), some))
		noteCode(abi.HMACSHA256("token", "", parts(1, 64<<10), some))
		noteCode(abi.HMACSHA256("token", "", []byte{9, 0, 0, 0, 1}, some))
		noteCode(abi.HMACSHA256("token", long64K[:257], parts(1, 1), some))
		noteCode(abi.HMACSHA256("none", "", parts(1, 1), some))
		noteCode(abi.HMACSHA256("token", "", parts(16, 1), some))
	})},
	{Name: "signatures", Want: "allow", Notes: []string{"-3", "-3", "-3", "-1", "-1", "-1", "-1", "-4"}, Request: pass(func() {
		noteCode(abi.Sign("none", 0, nil, some))
		noteCode(abi.Sign("none", 4, nil, some))
		noteCode(abi.Sign("none", abi.RS256, []byte(long64K+"x"), some))
		for range 5 {
			noteCode(abi.Sign("none", abi.RS256, nil, some))
		}
	})},
	{Name: "sign with what is not a key", Want: "error", Request: pass(func() { abi.Sign("token", abi.RS256, nil, some) })},
	{Name: "secrets after the request was sent", Request: letPass, Want: "allow", Notes: []string{"-2", "-2", "-2", "-2"}, Response: after(func() {
		noteCode(abi.SecretRef("token", some))
		noteCode(abi.EncodeRef(abi.Hex, "x", some))
		noteCode(abi.HMACSHA256("token", "", parts(1, 1), some))
		noteCode(abi.Sign("token", abi.RS256, nil, some))
	})},

	// Denials and notes.
	{Name: "deny", Want: "deny", Reason: "two lines", Request: pass(func() { abi.Deny(" two\nlines "); abi.Deny("second") })},
	{Name: "deny without a reason", Want: "deny", Reason: "denied by a policy", Request: pass(func() { abi.Deny("") })},
	{Name: "deny with a long reason", Want: "deny", Reason: long64K[:512], Request: pass(func() { abi.Deny(long64K[:513]) })},
	{Name: "deny a response, buffered", Features: sdk.BufferResponse, Request: letPass, Want: "deny", Reason: "no", Response: func(*sdk.Response) error { return errors.New("no") }},
	{Name: "notes", Want: "allow", Notes: []string{"a b", long64K[:256], "", "4", "5", "6", "7", "8"}, Request: pass(func() {
		sdk.Note("a\nb")
		sdk.Note(long64K[:300])
		sdk.Note("")
		for _, n := range []string{"4", "5", "6", "7", "8", "9"} {
			sdk.Note(n)
		}
	})},

	// Stored values.
	{Name: "keys and values", Want: "allow", Notes: []string{"-3", "-3", "-3", "-3", "ok", "-1", "-1", "ok"}, Request: pass(func() {
		noteCode(abi.KVSet("", nil, 0))
		noteCode(abi.KVSet(long64K[:257], nil, 0))
		noteCode(abi.KVSet("k", []byte(long64K[:4097]), 0))
		noteCode(abi.KVSet("k", nil, -1))
		noteCode(abi.KVSet(long64K[:256], []byte(long64K[:4096]), 0))
		noteCode(abi.KVGet("none", some))
		noteCode(abi.KVGet(long64K[:257], some))
		noteCode(abi.KVGet(long64K[:256], some))
	})},
	{Name: "counters", Want: "allow", Notes: []string{"-3", "-3", "-3", "ok", "-4", "9223372036854775807"}, Request: pass(func() {
		var out [8]byte
		abi.KVSet("text", []byte("abc"), 0)
		noteCode(abi.KVAdd("text", 1, 0, &out))
		noteCode(abi.KVAdd("", 1, 0, &out))
		noteCode(abi.KVAdd("new", 1, -1, &out))
		noteCode(abi.KVAdd("count", 1<<63-1, 0, &out))
		sum := out
		noteCode(abi.KVAdd("count", 1, 0, &out))
		sdk.Note(strconv.FormatInt(int64(binary.LittleEndian.Uint64(sum[:])), 10))
	})},
	{Name: "1,025 keys", Want: "allow", Notes: []string{"ok", "-4", "ok"}, Request: pass(func() {
		last := int32(0)
		for i := range 1024 {
			last = abi.KVSet("key"+strconv.Itoa(i), nil, 0)
		}
		noteCode(last)
		noteCode(abi.KVSet("one more", nil, 0))
		noteCode(abi.KVSet("key0", []byte("x"), 0))
	})},
	{Name: "more than 1 MiB stored", Want: "allow", Notes: []string{"ok", "-4"}, Request: pass(func() {
		last := int32(0)
		for i := range 255 {
			last = abi.KVSet(strconv.Itoa(1000+i), []byte(long64K[:4096]), 0)
		}
		noteCode(last)
		noteCode(abi.KVSet("1255", []byte(long64K[:4096]), 0))
	})},

	// An instance that starts has no exchange.
	{Name: "the method at the start", Want: "invalid", Request: letPass, Start: func() { abi.GetMethod(some) }},
	{Name: "the sandbox at the start", Want: "invalid", Request: letPass, Start: func() { abi.Sandbox(some) }},
	{Name: "store at the start", Want: "invalid", Request: letPass, Start: func() { abi.KVSet("k", nil, 0) }},
	{Name: "deny at the start", Want: "invalid", Request: letPass, Start: func() { abi.Deny("x") }},
	{Name: "a secret at the start", Want: "allow", Request: letPass, Start: func() {
		if abi.SecretRef("token", some) != abi.NotAllowed {
			abi.Deny("it got one")
		}
	}},
}

func fields(n, size int) {
	for i := range n {
		abi.AddHeaderValue(abi.RequestHeader, "X-"+strconv.Itoa(i), long64K[:size])
	}
}
