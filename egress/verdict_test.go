package egress

import (
	"bufio"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/network/dial"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/requestid"
	"github.com/doze-run/doze/testkit"
)

const token = "tok-V9x2QmZ7LwR4sK8pB3nD"

func TestSecretsArePlacedInRequestsAndRemovedFromResponses(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.push("bearer", bearer(1))
	b.secret("api", token, "a.web.test")
	b.rules(through("a.web.test", "bearer", "api"))
	b.servers.handle(echo)
	r := newRequest(t, "POST", "https://a.web.test/user?q=1", strings.NewReader("body"))
	r.Header.Set("Authorization", "Bearer mine")
	a := b.do(r)
	if got := b.servers.last(t); len(got.Header["Authorization"]) != 1 || got.Header.Get("Authorization") != "Bearer "+token || got.body != "body" {
		t.Errorf("the server got %v %q", got.Header, got.body)
	}
	b.want(a, 200, "Bearer "+strings.Repeat("*", len(token)))
	e := b.entry("a.web.test", nil)
	if e.Kind != audit.Request || e.Verdict != audit.Allow || e.Rule != "sandbox/through" || e.Method != "POST" || e.Path != "/user" || e.Status != 200 ||
		len(e.Secrets) != 1 || e.Secrets[0] != "api" || len(e.Policies) != 1 || e.Policies[0].Name != "bearer" ||
		!strings.HasPrefix(e.Policies[0].Digest, "sha256:") || e.BytesOut != 4 || e.BytesIn == 0 || !e.Address.IsLoopback() {
		t.Errorf("the audit log says %+v", e)
	}
	b.none(token)
}

func TestConnectionsPassThroughUnlessARuleInspectsThem(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.want(b.get("https://b.web.test/x"), 200, "this is b.web.test")
	b.Client.CloseIdleConnections() // a connection is logged when it ends
	if e := b.entry("b.web.test", nil); e.Kind != audit.Connection || e.Verdict != audit.Allow || e.Rule != "default" || e.BytesIn == 0 || e.BytesOut == 0 || !e.Address.IsLoopback() || e.Port != 443 {
		t.Errorf("the audit log says %+v", e)
	}
	if got := b.servers.last(t); got.TLS == nil || got.TLS.ServerName != "b.web.test" {
		t.Errorf("the server got %+v", got.TLS)
	}
	// Without TLS each request gets a decision and an entry.
	b.want(b.get("http://b.plain.test/x?y"), 200, "this is b.plain.test")
	if e := b.entry("b.plain.test", nil); e.Kind != audit.Request || e.Verdict != audit.Allow || e.Path != "/x" || e.Status != 200 {
		t.Errorf("the audit log says %+v", e)
	}
}

func TestVerdictsAreInTheResponseAndTheLog(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.push("no", denying("the policy says no"))
	b.push("own", responding(418, "short and stout"))
	b.push("trap", trapping())
	b.push("note", noting("a note"))
	b.rules(
		rule.Rule{Name: "deny", Hosts: []string{"deny.web.test", "deny.plain.test"}, Methods: []string{"POST"}, Action: rule.Deny, Reason: "only reading"},
		rule.Rule{Name: "answer", Hosts: []string{"answer.web.test"}, Action: rule.Respond, Response: &rule.Response{Status: 410, Body: "gone", Headers: map[string]string{"X-Own": "1"}}},
		rule.Rule{Name: "no", Hosts: []string{"no.web.test"}, Action: rule.Policies, Policies: []rule.Use{{Policy: "note"}, {Policy: "no"}}},
		rule.Rule{Name: "own", Hosts: []string{"own.web.test"}, Action: rule.Policies, Policies: []rule.Use{{Policy: "own"}}},
		rule.Rule{Name: "trap", Hosts: []string{"trap.web.test"}, Action: rule.Policies, Policies: []rule.Use{{Policy: "trap"}}},
	)
	for _, c := range []struct {
		method, url  string
		status       int
		text, code   string
		verdict      audit.Verdict
		rule, reason string
	}{
		{"POST", "https://deny.web.test/", 403, "only reading", "egress_denied", audit.Deny, "sandbox/deny", "only reading"},
		{"POST", "http://deny.plain.test/", 403, `"rule":"sandbox/deny"`, "egress_denied", audit.Deny, "sandbox/deny", "only reading"},
		{"GET", "https://deny.web.test/", 200, "this is", "", audit.Allow, "default", ""},
		{"GET", "https://answer.web.test/", 410, "gone", "", audit.Respond, "sandbox/answer", ""},
		{"GET", "https://no.web.test/", 403, "denied by policy no: the policy says no", "policy_denied", audit.Deny, "sandbox/no", "denied by policy no: the policy says no"},
		{"GET", "https://own.web.test/", 418, "short and stout", "", audit.Respond, "sandbox/own", "response of policy own"},
		{"GET", "https://trap.web.test/", 403, "the policy failed", "policy_failed", audit.Deny, "sandbox/trap", "unreachable"},
	} {
		a := b.do(newRequest(t, c.method, c.url, nil))
		b.want(a, c.status, c.text)
		if got := a.header.Get("Doze-Error"); got != c.code {
			t.Errorf("%s: its code is %q, want %q", c.url, got, c.code)
		}
		host := strings.Split(c.url, "/")[2]
		e := b.entry(host, func(e audit.Entry) bool { return e.Method == c.method })
		if e.Verdict != c.verdict || e.Rule != c.rule || !strings.Contains(e.Reason, c.reason) || e.Status != c.status || e.Kind != audit.Request {
			t.Errorf("%s: the audit log says %+v", c.url, e)
		}
		if c.code != "" {
			wantFlow(t, a, e)
		}
	}
	if e := b.entry("no.web.test", nil); len(e.Notes) != 1 || e.Notes[0] != "a note" || len(e.Policies) != 2 {
		t.Errorf("the audit log says %+v", e)
	}
	if got := b.servers.count(); got != 1 {
		t.Errorf("the servers got %d requests", got)
	}
}

// The status of a refusal follows from its code.
func TestRefusalsHaveTheCodeOfTheirCause(t *testing.T) {
	r := newRig(t)
	if err := r.reload(func(s *Settings) {
		s.Resolve = maps.Clone(s.Resolve)
		s.Resolve["cert.other.test"] = s.Resolve["*.web.test"] // the server's certificate is for *.web.test
		gone, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		gone.Close()
		s.Resolve["gone.other.test"] = dial.Override{Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}, Port: uint16(gone.Addr().(*net.TCPAddr).Port)}
	}); err != nil {
		t.Fatal(err)
	}
	b := r.box("k3f9x2m7q1az")
	b.secret("api", token, "offer.web.test", "bound.web.test")
	for name, module := range map[string][]byte{
		"deny": denying("not today"), "trap": trapping(), "uploading": writing(0), "responding": writing(1), "buffering": buffering(), "bearer": bearer(1),
	} {
		b.push(name, module)
	}
	policy := func(host, policy string) rule.Rule {
		made := through(host, policy, "")
		made.Name = strings.SplitN(host, ".", 2)[0]
		return made
	}
	look := func(name, host string) rule.Rule {
		return rule.Rule{Name: name, Hosts: []string{host}, Methods: []string{"GET"}, Action: rule.Allow}
	}
	secret := through("secret.web.test", "bearer", "api")
	b.rules(
		rule.Rule{Name: "rule", Hosts: []string{"rule.web.test"}, Paths: []string{"/**"}, Action: rule.Deny, Reason: "not that one"},
		policy("deny.web.test", "deny"), policy("trap.web.test", "trap"), policy("uploading.web.test", "uploading"),
		policy("responding.web.test", "responding"), policy("buffering.web.test", "buffering"), secret, offering("offer.web.test"),
		look("look", "look.web.test"), look("cert", "cert.other.test"), look("gone", "gone.other.test"),
	)
	b.servers.handle(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(make([]byte, 2<<20)) // more than policies may buffer
	})
	placeholder := b.Environment(b.sb.ID)["API_TOKEN"]
	for name, c := range map[string]struct {
		url    string
		change func(*http.Request)
		code   problem.Code
		status int
		rule   string
		detail string
	}{
		"a rule":                        {"https://rule.web.test/", nil, problem.EgressDenied, 403, "sandbox/rule", "not that one"},
		"a policy":                      {"https://deny.web.test/", nil, problem.PolicyDenied, 403, "sandbox/deny", "denied by policy deny: not today"},
		"a policy that traps":           {"https://trap.web.test/", nil, problem.PolicyFailed, 403, "sandbox/trap", "the policy failed"},
		"a request that gets too large": {"https://uploading.web.test/", nil, problem.PolicyBodyTooLarge, 413, "sandbox/uploading", "1048576 bytes"},
		"a response of a policy":        {"https://responding.web.test/", nil, problem.PolicyResponseTooLarge, 502, "sandbox/responding", "1048576 bytes"},
		"a response for a policy":       {"https://buffering.web.test/", nil, problem.PolicyResponseTooLarge, 502, "sandbox/buffering", "1048576 bytes"},
		"a secret for another host":     {"https://secret.web.test/", nil, problem.SecretNotAllowed, 403, "sandbox/through", "is not bound to secret.web.test"},
		"a placeholder for another host": {"https://look.web.test/", func(r *http.Request) { r.Header.Set("Authorization", placeholder) },
			problem.PlaceholderNotAllowed, 403, "sandbox/look", "no rule that permits this request offers it"},
		"another host":                   {"https://look.web.test/", func(r *http.Request) { r.Host = "other.web.test" }, problem.RequestMisdirected, 421, "", "other.web.test"},
		"a certificate for another host": {"https://cert.other.test/", nil, problem.UpstreamCertificateInvalid, 502, "", "for other names"},
		"an unreachable server":          {"https://gone.other.test/", nil, problem.UpstreamUnreachable, 502, "", "connection refused"},
	} {
		t.Run(name, func(t *testing.T) {
			req := newRequest(t, "GET", c.url, nil)
			req.Header.Set(requestid.Header, "of-the-client")
			if c.change != nil {
				c.change(req)
			}
			a := b.do(req)
			var why problem.Problem
			if err := json.Unmarshal([]byte(a.body), &why); err != nil {
				t.Fatalf("%v: %s", err, a.body)
			}
			if a.status != c.status || why.Status != c.status || why.Code != c.code || why.Rule != c.rule || why.Host != req.URL.Host || !strings.Contains(why.Detail, c.detail) {
				t.Errorf("got %d %s", a.status, a.body)
			}
			if a.header.Get(problem.HeaderError) != c.code.String() || a.header.Get("Content-Type") != problem.ContentType ||
				why.RequestID != "of-the-client" || a.header.Get(requestid.Header) != "of-the-client" {
				t.Errorf("header %v, body %s", a.header, a.body)
			}
			e := b.entry(req.URL.Host, func(e audit.Entry) bool { return e.Flow == why.Flow && e.Reason == why.Detail })
			if e.Status != c.status {
				t.Errorf("the audit log says %+v", e)
			}
		})
	}
}

// A response has the id of its request, and a client may put a placeholder in that id.
func TestRefusalsHaveNoSecretInTheirRequestID(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.secret("api", token, "a.web.test")
	b.rules(offering("a.web.test"))
	text := b.Environment(b.sb.ID)["API_TOKEN"]
	r.servers.web.Close()
	req := newRequest(t, "GET", "https://a.web.test/", nil)
	req.Header.Set(requestid.Header, text)
	a := b.do(req)
	b.want(a, 502, `"request_id":"`+text+`"`)
	if got := a.header.Get(requestid.Header); got != text {
		t.Errorf("the request's id is %q, want %q", got, text)
	}
	if all := fmt.Sprint(a); strings.Contains(all, token) {
		t.Errorf("the refusal has the secret: %s", all)
	}
}

// wantFlow fails the test unless a refusal names the flow of its entry in the audit log.
func wantFlow(t *testing.T, a response, e audit.Entry) {
	t.Helper()
	var refusal struct{ Flow string }
	if err := json.Unmarshal([]byte(a.body), &refusal); err != nil || refusal.Flow == "" || refusal.Flow != e.Flow || a.header.Get("Doze-Flow") != e.Flow {
		t.Errorf("the refusal is %v, %s; its entry is of flow %q", a.header, a.body, e.Flow)
	}
}

// fails connects, sends a text, and fails the test unless the connection ends without a
// response.
func (b *box) fails(address, says string) {
	b.t.Helper()
	conn, err := b.DialContext(testkit.Context(b.t), "tcp", address)
	if err != nil {
		return
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(testkit.Patience))
	_, _ = io.WriteString(conn, says)
	if got, err := io.ReadAll(conn); len(got) > 0 || err == nil {
		b.t.Errorf("%s answered %q, %v", address, got, err)
	}
}

func TestOtherProtocolsAreResetWhereRulesInspect(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.rules(
		rule.Rule{Name: "deny", Hosts: []string{"deny.tcp.test"}, Ports: []rule.Ports{{First: 5432, Last: 5432}, {First: 443, Last: 443}}, Action: rule.Deny, Reason: "no databases"},
		rule.Rule{Name: "look", Hosts: []string{"look.tcp.test"}, Ports: []rule.Ports{{First: 5432, Last: 5432}}, Methods: []string{"GET"}, Action: rule.Allow},
	)
	want := func(host, reason, ruleName string) {
		t.Helper()
		e := b.entry(host, func(e audit.Entry) bool { return strings.Contains(e.Reason, reason) })
		if e.Verdict != audit.Deny || e.Rule != ruleName || e.Kind != audit.Connection {
			t.Errorf("%s: the audit log says %+v", host, e)
		}
	}
	b.fails("deny.tcp.test:5432", "")
	want("deny.tcp.test", "no databases", "sandbox/deny")
	b.fails("deny.tcp.test:443", "\x16not readable as TLS")
	b.fails("look.tcp.test:5432", "\x00\x00\x00\x08")
	want("look.tcp.test", "neither HTTP nor TLS", "sandbox/look")
	b.fails("203.0.113.9:443", "")
	e := b.entry("", func(e audit.Entry) bool { return e.Address == netip.MustParseAddr("203.0.113.9") })
	if e.Verdict != audit.Deny || e.Rule != "default" || !strings.Contains(e.Reason, "the address was not looked up by a name") {
		t.Errorf("the audit log says %+v", e)
	}
	b.fails("198.18.0.1:22", "")
	if e := b.entry("", func(e audit.Entry) bool { return e.Port == 22 }); e.Verdict != audit.Deny {
		t.Errorf("the audit log says %+v", e)
	}
}

func TestOtherPortsPassWithoutFirstBytesOfTheClient(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.servers.mu.Lock()
	b.servers.speak = func(conn net.Conn) {
		_, _ = io.WriteString(conn, "hello\n")
		_, _ = io.Copy(conn, conn)
	}
	b.servers.mu.Unlock()
	conn, err := b.DialContext(testkit.Context(t), "tcp", "db.tcp.test:5432")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(testkit.Patience))
	r := bufio.NewReader(conn)
	if line, err := r.ReadString('\n'); line != "hello\n" {
		t.Fatalf("got %q, %v", line, err)
	}
	_, _ = io.WriteString(conn, "and you")
	_ = conn.(interface{ CloseWrite() error }).CloseWrite()
	if got, err := io.ReadAll(r); string(got) != "and you" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
	if e := b.entry("db.tcp.test", nil); e.Verdict != audit.Allow || e.BytesOut != 7 || e.BytesIn != 13 || e.Port != 5432 {
		t.Errorf("the audit log says %+v", e)
	}
}

func TestServerNamesMustMatchTheResolvedName(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.rules(rule.Rule{Name: "look", Hosts: []string{"look.web.test", "look.tcp.test"}, Ports: []rule.Ports{{First: 1, Last: 65535}}, Methods: []string{"GET"}, Action: rule.Allow})
	other := func(host, serverName string) {
		t.Helper()
		conn, err := b.DialContext(testkit.Context(t), "tcp", host)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(testkit.Patience))
		if err := tls.Client(conn, &tls.Config{ServerName: serverName, InsecureSkipVerify: true}).Handshake(); err == nil {
			t.Errorf("%s as %q: TLS was made", host, serverName)
		}
	}
	for _, host := range []string{"pass.web.test:443", "look.web.test:443", "look.tcp.test:9000", "pass.tcp.test:9000"} {
		other(host, "other.web.test")
		name, _, _ := net.SplitHostPort(host)
		if e := b.entry(name, nil); e.Verdict != audit.Deny || !strings.Contains(e.Reason, "other.web.test") {
			t.Errorf("the audit log says %+v", e)
		}
	}
	for _, host := range []string{"pass.web.test:443", "look.web.test:443"} {
		other(host, "")
		name, _, _ := net.SplitHostPort(host)
		b.entry(name, func(e audit.Entry) bool {
			return e.Verdict == audit.Deny && strings.Contains(e.Reason, "no server name (SNI)")
		})
	}
	for _, url := range []string{"https://look.web.test/", "http://pass.plain.test/"} {
		r := newRequest(t, "GET", url, nil)
		r.Host = "other.web.test"
		a := b.do(r)
		b.want(a, http.StatusMisdirectedRequest, `"code":"request_misdirected"`)
		e := b.entry(r.URL.Host, func(e audit.Entry) bool { return e.Kind == audit.Request })
		wantFlow(t, a, e)
		if e.Verdict != audit.Deny || e.Status != 421 || !strings.Contains(e.Reason, "other.web.test") {
			t.Errorf("the audit log says %+v", e)
		}
	}
	if b.servers.count() != 0 {
		t.Error("a server got something")
	}
}

// A client may use an HTTP/2 connection for every name in its certificate. The node's
// certificate has one name.
func TestConnectionsAreNotReusedForAnotherHost(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.rules(rule.Rule{Name: "look", Hosts: []string{"*.web.test"}, Methods: []string{"GET"}, Action: rule.Allow})
	client := b.speaks(2)
	ask := func(host string, status int, text string) {
		t.Helper()
		r := newRequest(t, "GET", "https://a.web.test/", nil)
		r.Host = host
		reused := false
		trace := &httptrace.ClientTrace{GotConn: func(c httptrace.GotConnInfo) { reused = c.Reused }}
		client.want(client.do(r.WithContext(httptrace.WithClientTrace(r.Context(), trace))), status, text)
		if first := b.servers.count() == 1 && status == 200; reused == first {
			t.Errorf("%s: the connection was reused: %v", host, reused)
		}
	}
	ask("a.web.test", http.StatusOK, "this is a.web.test")
	ask("b.web.test", http.StatusMisdirectedRequest, `"code":"request_misdirected"`)
	ask("a.web.test", http.StatusOK, "this is a.web.test")
	if e := b.entry("a.web.test", func(e audit.Entry) bool { return e.Status == 421 }); e.Verdict != audit.Deny || !strings.Contains(e.Reason, "b.web.test") {
		t.Errorf("the audit log says %+v", e)
	}
	if n := b.servers.count(); n != 2 {
		t.Errorf("the servers got %d requests", n)
	}
}

// On HTTP ports, anything that a lenient server accepts as a request is a request.
func TestLenientRequestsAreRecognized(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	for _, request := range []string{
		"get / HTTP/1.1\r\nHost: other.plain.test\r\n\r\n", "\r\nGET / HTTP/1.1\r\nHost: other.plain.test\r\n\r\n",
		"GET\t/ HTTP/1.1\r\nHost: other.plain.test\r\n\r\n", strings.Repeat("A", 50) + " / HTTP/1.1\r\nHost: other.plain.test\r\n\r\n",
	} {
		conn, err := b.DialContext(testkit.Context(t), "tcp", "a.tcp.test:80") // the server would echo the request
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(testkit.Patience))
		_, _ = io.WriteString(conn, request)
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || res.StatusCode != 421 && res.StatusCode != 400 {
			t.Errorf("%q: got %+v, %v", request, res, err)
		} else {
			res.Body.Close()
		}
		conn.Close()
	}
	for _, says := range []string{"SSH-2.0-client\r\n", "ping", "\x00\x01"} {
		conn, err := b.DialContext(testkit.Context(t), "tcp", "b.tcp.test:80")
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(testkit.Patience))
		_, _ = io.WriteString(conn, says)
		_ = conn.(interface{ CloseWrite() error }).CloseWrite()
		if got, err := io.ReadAll(conn); string(got) != says {
			t.Errorf("got %q, %v", got, err)
		}
		conn.Close()
	}
}

func TestEntriesIdentifyTheirConnection(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	for _, path := range []string{"/1", "/2"} { // over one connection
		b.want(b.get("http://a.plain.test"+path), 200, "this is")
	}
	b.Client.CloseIdleConnections()
	b.want(b.get("http://a.plain.test/3"), 200, "this is")
	flow := func(path string) string {
		return b.entry("a.plain.test", func(e audit.Entry) bool { return e.Path == path }).Flow
	}
	if first, second, third := flow("/1"), flow("/2"), flow("/3"); first == "" || second != first || third == first {
		t.Errorf("the flows are %q, %q and %q", first, second, third)
	}
	b.rules(rule.Rule{Name: "no", Hosts: []string{"no.tcp.test"}, Ports: []rule.Ports{{First: 9, Last: 9}}, Action: rule.Deny})
	if conn, err := b.DialContext(testkit.Context(t), "tcp", "no.tcp.test:9"); err == nil {
		conn.Close()
		t.Error("connected")
	}
	if e := b.entry("no.tcp.test", nil); e.Kind != audit.Connection || e.Flow == "" {
		t.Errorf("the audit log says %+v", e)
	}
}

func TestRefusedNamesAreRecordedWithTheirRule(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.rules(rule.Rule{Name: "never", Hosts: []string{"never.web.test"}, Action: rule.Deny, Reason: "not this one"})
	if _, err := b.DialContext(testkit.Context(t), "tcp", "never.web.test:443"); err == nil {
		t.Error("it has an address")
	}
	if e := b.entry("never.web.test", nil); e.Kind != audit.DNS || e.Verdict != audit.Deny || e.Rule != "sandbox/never" || e.Reason != "not this one" {
		t.Errorf("the audit log says %+v", e)
	}
}

// The name has an address, but a rule on its ports denies the connection: the client gets
// the reason.
func TestDeniedConnectionsGetTheReason(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.rules(rule.Rule{Name: "port", Hosts: []string{"a.web.test", "a.plain.test"}, Ports: []rule.Ports{{First: 80, Last: 80}, {First: 443, Last: 443}}, Action: rule.Deny, Reason: "not there"})
	for _, url := range []string{"https://a.web.test/", "http://a.plain.test/"} {
		b.want(b.get(url), 403, `"detail":"not there"`)
		host := strings.Split(url, "/")[2]
		if e := b.entry(host, nil); e.Kind != audit.Connection || e.Verdict != audit.Deny || e.Rule != "sandbox/port" {
			t.Errorf("the audit log says %+v", e)
		}
	}
}

func TestPrivateAddressesAreRefused(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.nodeRules(rule.Rule{Name: "net", Addresses: []string{"169.254.0.0/16", "127.0.0.0/8"}, Action: rule.Allow})
	b.fails("169.254.169.254:80", "")
	metadata := netip.MustParseAddr("169.254.169.254")
	e := b.entry("", func(e audit.Entry) bool { return e.Address == metadata })
	if e.Verdict != audit.Deny || e.Rule != "node/net" || !strings.Contains(e.Reason, "metadata") {
		t.Errorf("the audit log says %+v", e)
	}
	b.want(b.get("http://localhost.plain.test/"), 200, "this is") // the operator configured its address
}

func TestUnreachableServersAreErrors(t *testing.T) {
	r := newRig(t)
	r.servers.web.Close()
	b := r.box("k3f9x2m7q1az")
	b.rules(rule.Rule{Name: "look", Hosts: []string{"look.web.test"}, Methods: []string{"GET"}, Action: rule.Allow})
	unreachable := b.get("https://look.web.test/")
	b.want(unreachable, 502, "upstream_unreachable")
	e := b.entry("look.web.test", nil)
	if e.Verdict != audit.Error || e.Status != 502 || !strings.Contains(e.Reason, "no connection") {
		t.Errorf("the audit log says %+v", e)
	}
	wantFlow(t, unreachable, e)
	if _, err := b.try(newRequest(t, "GET", "https://pass.web.test/", nil)); err == nil {
		t.Error("it got a response")
	}
	if e := b.entry("pass.web.test", nil); e.Verdict != audit.Error || e.Kind != audit.Connection {
		t.Errorf("the audit log says %+v", e)
	}
}

// An owner's policy must not bypass the node's rules.
func TestRulesApplyToRequestsThatPoliciesChanged(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.servers.handle(echo)
	b.push("harmless", rewriting("/open"))
	if _, err := r.PutPolicy(t.Context(), operator, "harmless", rewriting("/open")); err != nil {
		t.Fatal(err)
	}
	b.push("admin", rewriting("/admin/users"))
	b.push("watched", rewriting("/watched/users"))
	r.nodeRules(
		rule.Rule{Name: "admin", Hosts: []string{"a.web.test"}, Paths: []string{"/admin/**"}, Action: rule.Deny, Reason: "not for sandboxes"},
		rule.Rule{Name: "watched", Hosts: []string{"a.web.test"}, Paths: []string{"/watched/**"}, Action: rule.Policies, Policies: []rule.Use{{Policy: "harmless"}}})
	for policy, want := range map[string][]string{
		"harmless": nil,
		"admin":    {`"detail":"as its policies changed it, not for sandboxes"`, `"host":"a.web.test","rule":"node/admin"`},
		"watched":  {"its policies changed it so that other rules apply"},
	} {
		before := b.servers.count()
		b.rules(through("a.web.test", policy, "none"))
		a := b.get("https://a.web.test/")
		if want == nil {
			b.want(a, 200, "")
			continue
		}
		for _, text := range want {
			b.want(a, 403, text)
		}
		if b.servers.count() != before {
			t.Errorf("%s: a request got there", policy)
		}
	}
}

// A field that the client names in Connection is removed from its request before rules
// match. A field that a policy adds is not removed.
func TestClientsCannotRemoveFieldsThatPoliciesSet(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.servers.handle(echo)
	b.push("bearer", bearer(1))
	b.secret("api", token, "a.web.test")
	b.rules(through("a.web.test", "bearer", "api"),
		rule.Rule{Name: "version", Hosts: []string{"b.web.test"}, Headers: map[string]string{"X-Version": "2"}, Action: rule.Allow},
		rule.Rule{Name: "no-version", Hosts: []string{"b.web.test"}, Action: rule.Respond, Response: &rule.Response{Status: 418}})
	b.Client.Transport.(*http.Transport).ForceAttemptHTTP2 = false // HTTP/2 has no Connection header
	r := newRequest(t, "GET", "https://a.web.test/", nil)
	r.Header.Set("Connection", "Authorization")
	b.want(b.do(r), 200, "")
	if got := b.servers.last(t).Header.Get("Authorization"); got != "Bearer "+token {
		t.Errorf("the server got %q", got)
	}
	r = newRequest(t, "GET", "https://b.web.test/", nil)
	r.Header = http.Header{"Connection": {"X-Version"}, "X-Version": {"2"}}
	b.want(b.do(r), 418, "")
}

func TestBufferingPoliciesPassOnCompleteResponsesOnly(t *testing.T) {
	b := newRig(t).box("k3f9x2m7q1az")
	b.push("whole", buffering())
	b.rules(through("*.web.test", "whole", ""))
	b.Client.Transport.(*http.Transport).ForceAttemptHTTP2 = false // in HTTP/1.1 the length shows whether a response is complete
	b.servers.handle(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(make([]byte, 100_000))
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	if a, err := b.try(newRequest(t, "GET", "https://a.web.test/", nil)); err == nil {
		t.Errorf("the client takes %d with %d bytes for a complete response", a.status, len(a.body))
	}
	if e := b.entry("a.web.test", nil); e.Verdict != audit.Error || e.Status != 200 {
		t.Errorf("the audit log says %+v", e)
	}
	b.servers.handle(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 2<<20)) })
	b.want(b.get("https://b.web.test/"), 502, "this one has more than 1048576 bytes")
	if e := b.entry("b.web.test", nil); e.Verdict != audit.Deny || !strings.Contains(e.Reason, "1048576") {
		t.Errorf("the audit log says %+v", e)
	}
}
