package caddymodule

import (
	"crypto/tls"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/wakeproxy"
)

// from makes a client whose TLS connections are for the name sni, whatever
// host its requests name.
func (s *site) from(sni string, h2 bool) *http.Client {
	client := s.client(h2)
	client.Transport.(*http.Transport).TLSClientConfig = &tls.Config{InsecureSkipVerify: true, ServerName: sni}
	return client
}

// ask sends a request to a host over a connection for another name.
func (s *site) ask(client *http.Client, host, path string) *http.Response {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), "GET", "https://"+host+":"+strconv.Itoa(s.port)+path, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+testToken)
	return s.do(client, req)
}

// Browsers share connections between hosts that one certificate covers, and
// others send any Host over any connection.
func TestWhichHostsAConnectionMayName(t *testing.T) {
	s := newSite(t)
	name := func(app string) string {
		_, address := s.sandbox(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, app) }, sandbox.Port{})
		u, err := url.Parse(address)
		if err != nil {
			t.Fatal(err)
		}
		return u.Hostname()
	}
	one, two := name("one"), name("two")
	for _, h2 := range []bool{false, true} {
		over := s.from(one, h2)
		if got := testkit.Body(t, s.ask(over, one, "/")); got != "one" {
			t.Errorf("its own host sent %q", got)
		}
		if got := testkit.Body(t, s.ask(over, two, "/")); got != "two" {
			t.Errorf("another preview, whose token it knows, sent %q", got)
		}
		for _, host := range []string{apiHost, strings.ToUpper(apiHost)} {
			res := s.ask(over, host, "/api/v1/node")
			if got := testkit.Body(t, res); res.StatusCode != http.StatusMisdirectedRequest || !strings.Contains(got, `"request_misdirected"`) || strings.Contains(got, `"enforced_limits"`) {
				t.Errorf("the API responded over a preview's connection: %d %s", res.StatusCode, got)
			} else if id := res.Header.Get("X-Request-Id"); id == "" || !strings.Contains(got, `"request_id":"`+id+`"`) {
				t.Errorf("X-Request-Id %q of %s", id, got)
			}
		}
		if res := s.ask(s.from(apiHost, h2), apiHost, "/api/v1/node"); res.StatusCode != 200 {
			t.Errorf("the API over its own connection: %d", res.StatusCode)
		}
		if got := testkit.Body(t, s.ask(s.from(apiHost, h2), one, "/")); got != "one" {
			t.Errorf("a preview over the API's connection sent %q", got)
		}
	}
}

// Caddy's own response to a host without a site is an empty 200.
func TestAHostThatNoSiteHasIsAProblemAndATrailingDotIsNoOtherHost(t *testing.T) {
	s := newSite(t)
	_, address := s.sandbox(hello, sandbox.Port{})
	preview, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	for _, h2 := range []bool{false, true} {
		over := s.from(preview.Hostname(), h2)
		for _, host := range []string{"unknown.example", defaultPreviewDomain, "a.b." + defaultPreviewDomain, "127.0.0.1"} {
			res := s.ask(over, host, "/")
			if got := testkit.Body(t, res); res.StatusCode != 404 || !strings.Contains(got, `"preview_not_found"`) {
				t.Errorf("host %s: %d %q", host, res.StatusCode, got)
			}
		}
		if got := testkit.Body(t, s.ask(over, preview.Hostname()+".", "/")); got != "hello" {
			t.Errorf("with a trailing dot the preview sent %q", got)
		}
		if res := s.ask(over, apiHost+".", "/api/v1/node"); res.StatusCode != 404 || strings.Contains(testkit.Body(t, res), `"enforced_limits"`) {
			t.Errorf("the API with a trailing dot over a preview's connection: %d", res.StatusCode)
		}
	}
}

// Caddy's own setting is stricter, for operators that want that.
func TestStrictSNIHostRefusesWhatIsShared(t *testing.T) {
	s := newSite(t)
	s.global = "servers {\n\t\tstrict_sni_host on\n\t}"
	s.mustLoad("", "")
	_, address := s.sandbox(hello, sandbox.Port{})
	preview, _ := url.Parse(address)
	for sni, status := range map[string]int{preview.Hostname(): 200, apiHost: 421, "any." + defaultPreviewDomain: 421} {
		if res := s.ask(s.from(sni, true), preview.Hostname(), "/"); res.StatusCode != status {
			t.Errorf("over a connection for %s: status %d, want %d", sni, res.StatusCode, status)
		}
	}
}

func TestAPIIsNotServedUnderPreviewDomains(t *testing.T) {
	s := newSite(t)
	port := testkit.FreePort(t)
	// The API on every host, and previews under a second domain.
	s.mustLoad("", "http://:"+strconv.Itoa(port)+" {\n\thandle /api/* {\n\t\tdoze_api\n\t}\n\tdoze_preview p.example.org\n}")
	for host, status := range map[string]int{
		apiHost: 200, "p.example.org": 404, "x.p.example.org": 404, "X.P.Example.Org.": 404,
		"x." + defaultPreviewDomain: 404, "xp.example.org": 200,
	} {
		req, _ := http.NewRequestWithContext(t.Context(), "GET", "http://127.0.0.1:"+strconv.Itoa(port)+"/api/v1/node", nil)
		req.Host = host
		req.Header.Set("Authorization", "Bearer "+testToken)
		if res := s.do(http.DefaultClient, req); (res.StatusCode == 200) != (status == 200) || strings.Contains(testkit.Body(t, res), `"enforced_limits"`) != (status == 200) {
			t.Errorf("%s: status %d", host, res.StatusCode)
		}
	}
}

// Cookies and headers of a sandbox do not reach beyond its preview.
func TestASandboxSetsNothingBeyondItsPreview(t *testing.T) {
	s := newSite(t)
	_, address := s.sandbox(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		for _, domain := range []string{"preview.doze.localhost", ".doze.localhost", "DOZE.LOCALHOST", "api.doze.localhost", ""} {
			h.Add("Set-Cookie", "token="+testToken+"; Path=/; DoMaIn = "+domain+"; Secure")
		}
		h["Set-Cookie"] = append(h["Set-Cookie"], "a=b;domain=doze.localhost;domain=localhost")
		h.Set("Doze-Wake", "cold")
		h.Set("Doze-Anything", "forged")
		h.Set("Connection", "X-Hop")
		h.Set("X-Hop", "hop-by-hop")
		h.Set("Keep-Alive", "timeout=5")
		h.Set("Proxy-Authenticate", "Basic")
		h.Set("App", strings.Join([]string{r.Header.Get("X-Hop"), r.Header.Get("Keep-Alive"), r.Header.Get("Proxy-Authorization"), r.Header.Get("Proxy-Connection"), r.Header.Get("Te"), r.Header.Get("Doze-Sandbox"), r.Header.Get("Connection")}, ""))
	}, sandbox.Port{})
	for _, h2 := range []bool{false, true} {
		req, _ := http.NewRequestWithContext(t.Context(), "GET", address, nil)
		req.Header.Set("Doze-Sandbox", "forged")
		if !h2 { // HTTP/2 has none of these
			req.Header.Set("Connection", "X-Hop, keep-alive")
			for _, name := range []string{"X-Hop", "Keep-Alive", "Proxy-Authorization", "Proxy-Connection", "Te"} {
				req.Header.Set(name, "hop-by-hop")
			}
		}
		res := s.do(s.client(h2), req)
		if got := res.Header.Get("App"); got != "" {
			t.Errorf("the app got %q", got)
		}
		cookies := res.Header.Values("Set-Cookie")
		if len(cookies) != 6 {
			t.Errorf("%d cookies: %q", len(cookies), cookies)
		}
		for _, cookie := range cookies {
			if parsed, err := http.ParseSetCookie(cookie); err != nil || parsed.Domain != "" || strings.Contains(strings.ToLower(cookie), "domain") {
				t.Errorf("the cookie %q has a domain, %v", cookie, err)
			}
		}
		for _, name := range []string{"Doze-Wake", "Doze-Anything", "X-Hop", "Keep-Alive", "Proxy-Authenticate"} {
			if got := res.Header.Get(name); got != "" {
				t.Errorf("%s: %s", name, got)
			}
		}
	}
}

// A script in a preview can set a cookie for a parent domain, so the API must
// take none.
func TestTheAPITakesNoCookie(t *testing.T) {
	s := newSite(t)
	req, _ := http.NewRequestWithContext(t.Context(), "GET", "https://"+apiHost+":"+strconv.Itoa(s.port)+"/api/v1/node", nil)
	for _, name := range []string{"token", "Authorization", "access_token", "session"} {
		req.AddCookie(&http.Cookie{Name: name, Value: testToken})
		req.AddCookie(&http.Cookie{Name: name, Value: "Bearer " + testToken})
	}
	res := s.do(s.client(true), req)
	if res.StatusCode != 401 || len(res.Header.Values("Set-Cookie")) != 0 {
		t.Errorf("status %d, %v", res.StatusCode, res.Header)
	}
}

func TestAPublicPreviewHasNoTokenInItsAddress(t *testing.T) {
	s := newSite(t)
	sb, address := s.sandbox(hello, sandbox.Port{Access: sandbox.AccessPublic})
	port := sb.Ports[0]
	want := "https://" + strconv.Itoa(int(port.Port)) + "-" + string(sb.ID) + "." + defaultPreviewDomain + ":" + strconv.Itoa(s.port) + "/"
	if address != want {
		t.Fatalf("its address is %s, want %s", address, want)
	}
	if got := testkit.Body(t, s.fetch(s.client(true), address)); got != "hello" {
		t.Errorf("the response is %q", got)
	}
}

func TestRefusingPortRespondsWith410ThroughCaddy(t *testing.T) {
	s := newSite(t)
	sb, address := s.sandbox(hello, sandbox.Port{Wake: sandbox.WakeNever})
	if res := s.fetch(s.client(true), address); res.StatusCode != 200 {
		t.Errorf("running: status %d", res.StatusCode)
	}
	if _, err := s.Manager.Sleep(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"", ".doze/wake"} {
		res := s.fetch(s.client(true), address+path)
		if got := testkit.Body(t, res); res.StatusCode != 410 || !strings.Contains(got, `"sandbox_not_running"`) {
			t.Errorf("asleep: %d %s", res.StatusCode, got)
		}
	}
	if got := s.get(sb.ID).State; got != sandbox.StateAsleep {
		t.Errorf("it is %s", got)
	}
}

// Certificates on demand, by real handshakes.
func TestAHandshakeNeedsAnExistingPreviewAndWakesNothing(t *testing.T) {
	s := newSite(t)
	const domain = "p.example.org"
	s.global = "on_demand_tls {\n\t\tpermission doze " + domain + "\n\t}"
	port := testkit.FreePort(t)
	at := ":" + strconv.Itoa(port)
	s.mustLoad("", "https://*."+domain+at+" {\n\ttls {\n\t\tissuer internal\n\t\ton_demand\n\t}\n\tdoze_preview "+domain+"\n}")
	sb, _ := s.sandbox(hello, sandbox.Port{})
	if _, err := s.Manager.Sleep(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	name := wakeproxy.Name{Port: sb.Ports[0].Port, ID: sb.ID, Token: sb.Ports[0].Token}
	handshake := func(name string) error {
		conn, err := tls.Dial("tcp", "127.0.0.1"+at, &tls.Config{ServerName: name, InsecureSkipVerify: true})
		if err != nil {
			return err
		}
		defer conn.Close()
		if leaf := conn.ConnectionState().PeerCertificates[0]; leaf.VerifyHostname(name) != nil || strings.HasPrefix(leaf.DNSNames[0], "*") {
			return errors.New("the certificate is for " + leaf.DNSNames[0])
		}
		return nil
	}
	for what, wrong := range map[string]string{
		"no preview":      "www." + domain,
		"no token":        wakeproxy.Name{Port: name.Port, ID: name.ID}.Host(domain),
		"another sandbox": wakeproxy.Name{Port: name.Port, ID: "aaaaaaaaaaaa", Token: name.Token}.Host(domain),
		"another port":    wakeproxy.Name{Port: name.Port + 1, ID: name.ID, Token: name.Token}.Host(domain),
	} {
		if err := handshake(wrong); err == nil {
			t.Errorf("%s: %s has a certificate", what, wrong)
		}
	}
	if err := handshake(name.Host(domain)); err != nil {
		t.Errorf("the preview's own name: %v", err)
	}
	if got := s.get(sb.ID).State; got != sandbox.StateAsleep {
		t.Errorf("it is %s", got)
	}
}
