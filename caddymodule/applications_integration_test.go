//go:build integration

package caddymodule

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

// applicationsDomain is not localhost's, whose names dev servers let pass.
const applicationsDomain = "preview.example.test"

// startLimit is for a dev server that compiles on a machine with much to do.
const startLimit = 3 * time.Minute

// TestApplications runs the table of docs/previews.md: each row is a case.
func TestApplications(t *testing.T) {
	dir := testnode.Modules(t, "testdata/applications")
	copyOver(t, dir, "testdata/applications")
	addModulesOfVSCode(t, dir)
	s := newSite(t)
	s.mustLoad("preview_domain "+applicationsDomain, "*."+applicationsDomain+" {\n\ttls internal\n\tdoze_preview\n}")

	node := func(argv ...string) []string { return append([]string{"node"}, argv...) }
	django := []string{"/usr/bin/python3", "django_app.py"}
	rails := []string{"/usr/bin/puma", "--quiet", "--config", "-", "--bind", "tcp://127.0.0.1:$PORT", "rails_app.ru"}
	data := t.TempDir()
	codeServer := node("--require", "./code_server_argon2.js", "node_modules/code-server/out/node/entry.js",
		"--auth", "none", "--bind-addr", "127.0.0.1:$PORT", "--disable-telemetry", "--disable-update-check",
		"--config", filepath.Join(data, "config.yaml"), "--user-data-dir", data)
	cases := map[string]struct {
		argv []string
		dir  string
		env  string
		test func(*application)
	}{
		"Vite 8":                   {argv: node("../node_modules/vite/bin/vite.js", "--host", "127.0.0.1", "--strictPort", "--port", "$PORT"), dir: "vite", test: testViteServer},
		"Next.js 16, dev server":   {argv: node("../node_modules/next/dist/bin/next", "dev", "-H", "127.0.0.1", "-p", "$PORT"), dir: "next", env: "ROOT=" + dir, test: testNext},
		"Django, default settings": {argv: django, test: testDjango},
		"Django, SECURE_PROXY_SSL_HEADER and SECURE_SSL_REDIRECT": {argv: django, env: "PROXY=1", test: testDjangoBehindAProxy},
		"Rails in development":                           {argv: rails, env: "RAILS_ENV=development", test: testRailsInDevelopment},
		"Rails in production, `force_ssl`":               {argv: rails, env: "RAILS_ENV=production", test: testRailsInProduction},
		"code-server":                                    {argv: codeServer, test: testCodeServer},
		"Express, secure session cookies, `trust proxy`": {argv: node("express.js"), test: testSession},
		"Express, OAuth `redirect_uri` from the request": {argv: node("express.js"), test: testOAuth},
	}
	rows := documentedApplications(t)
	for name := range cases {
		if !rows[name] {
			t.Errorf("docs/previews.md has no row %q", name)
		}
	}
	for name := range rows {
		test, ok := cases[name]
		if !ok {
			t.Errorf("no case for the row %q of docs/previews.md", name)
			continue
		}
		t.Run(name, func(t *testing.T) {
			port := testkit.FreePort(t)
			argv := slices.Clone(test.argv)
			for i, arg := range argv {
				argv[i] = strings.ReplaceAll(arg, "$PORT", strconv.Itoa(port))
			}
			runApplication(t, filepath.Join(dir, test.dir), port, argv, test.env)
			_, address := s.sandboxAt(sandbox.Port{Port: uint16(port)})
			jar, err := cookiejar.New(nil)
			if err != nil {
				t.Fatal(err)
			}
			client := s.client(false)
			client.Jar = jar
			test.test(&application{t: t, site: s, port: port, origin: strings.TrimSuffix(address, "/"), client: client})
		})
	}
}

// documentedApplications are the names in the first column of the table.
func documentedApplications(t *testing.T) map[string]bool {
	t.Helper()
	content, err := os.ReadFile("../docs/previews.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(content), "\n## Applications\n")
	rows := map[string]bool{}
	for line := range strings.Lines(table) {
		if cells := strings.Split(line, "|"); len(cells) == 5 {
			rows[strings.TrimSpace(cells[1])] = true
		}
	}
	delete(rows, "application")
	delete(rows, "---")
	if len(rows) == 0 {
		t.Fatal("docs/previews.md has no table of applications")
	}
	return rows
}

// copyOver copies a folder over what is in another one.
func copyOver(t *testing.T, to, from string) {
	t.Helper()
	files := os.DirFS(from)
	err := fs.WalkDir(files, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || strings.HasPrefix(name, "package") {
			return err // npm wrote those
		}
		if d.IsDir() {
			return os.MkdirAll(filepath.Join(to, name), 0o755)
		}
		content, err := fs.ReadFile(files, name)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(to, name), content, 0o644)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// addModulesOfVSCode installs the dependencies of the VS Code within code-server.
// code-server's own install script would do that and build native modules, which
// the editor's page and its connection to the server do not need.
func addModulesOfVSCode(t *testing.T, dir string) {
	t.Helper()
	vscode := filepath.Join(dir, "node_modules/code-server/lib/vscode")
	modules := filepath.Join(testnode.Modules(t, vscode), "node_modules")
	if err := os.Symlink(modules, filepath.Join(vscode, "node_modules")); err != nil && !errors.Is(err, fs.ErrExist) {
		t.Fatal(err)
	}
}

// runApplication starts a program and waits until its port accepts connections.
// It ends with the test, and so does every process that it started.
func runApplication(t *testing.T, dir string, port int, argv []string, env string) {
	t.Helper()
	var output bytes.Buffer
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PORT="+strconv.Itoa(port), "NEXT_TELEMETRY_DISABLED=1", "PYTHONDONTWRITEBYTECODE=1", env)
	cmd.Stdout, cmd.Stderr = &output, &output
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // it is killed
		close(ended)
	}()
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // ESRCH: it has ended
		<-ended
		if t.Failed() {
			t.Logf("%v said:\n%s", argv, output.String())
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), startLimit)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err == nil {
			conn.Close()
			return
		}
		select {
		case <-tick.C:
		case <-ended:
			t.Fatalf("%v ended before it listened", argv)
		case <-ctx.Done():
			t.Fatalf("%v does not listen on port %d", argv, port)
		}
	}
}

// application is a program behind the preview of a sandbox, and the browser of
// its visitor.
type application struct {
	t      *testing.T
	site   *site
	port   int
	origin string // of the preview
	client *http.Client
}

// visit sends a request with the headers of a browser whose page is the preview's.
func (a *application) visit(method, path, contentType, body string, want int) (string, http.Header) {
	a.t.Helper()
	req, err := http.NewRequestWithContext(a.t.Context(), method, a.origin+path, strings.NewReader(body))
	if err != nil {
		a.t.Fatal(err)
	}
	if method == "POST" {
		req.Header.Set("Origin", a.origin)
		req.Header.Set("Referer", a.origin+"/form")
		req.Header.Set("Content-Type", contentType)
		req.Header.Set("Sec-Fetch-Site", "same-origin")
	}
	res := a.site.do(a.client, req)
	got := testkit.Body(a.t, res)
	if res.StatusCode != want {
		a.t.Fatalf("%s %s: status %d, want %d: %.2000s", method, path, res.StatusCode, want, got)
	}
	return got, res.Header
}

func (a *application) post(path, body string, want int) (string, http.Header) {
	a.t.Helper()
	return a.visit("POST", path, "application/x-www-form-urlencoded", body, want)
}

// webSocket opens one as a page of the preview does.
func (a *application) webSocket(path string, protocols ...string) *websocket.Conn {
	a.t.Helper()
	c, res, err := a.dial(path, a.origin, protocols...)
	if err != nil {
		a.t.Fatalf("the WebSocket %s: %v, %v", path, err, res)
	}
	a.t.Cleanup(func() { c.CloseNow() })
	return c
}

// refuseForeignWebSocket expects the application to refuse a WebSocket of another origin's page.
func (a *application) refuseForeignWebSocket(path string, status int, protocols ...string) {
	a.t.Helper()
	c, res, err := a.dial(path, "https://other.example.test", protocols...)
	if err == nil {
		c.CloseNow()
		a.t.Fatalf("a page of another origin can open the WebSocket %s", path)
	}
	if res == nil || res.StatusCode != status {
		a.t.Errorf("a page of another origin that opens the WebSocket %s got %v, %v, want status %d", path, res, err, status)
	}
}

func (a *application) dial(path, origin string, protocols ...string) (*websocket.Conn, *http.Response, error) {
	return websocket.Dial(a.t.Context(), "wss"+strings.TrimPrefix(a.origin, "https")+path, &websocket.DialOptions{
		HTTPClient:   a.site.client(false),
		HTTPHeader:   http.Header{"Origin": {origin}},
		Subprotocols: protocols,
	})
}

func (a *application) find(in, expression string) string {
	a.t.Helper()
	found := regexp.MustCompile(expression).FindStringSubmatch(in)
	if found == nil {
		a.t.Fatalf("no %s in %.4000s", expression, in)
	}
	return found[1]
}

func testViteServer(a *application) {
	a.visit("GET", "/", "", "", 200)
	a.visit("GET", "/main.js", "", "", 200)
	client, _ := a.visit("GET", "/@vite/client", "", "", 200)
	token := a.find(client, `wsToken = "([^"]+)"`)
	c := a.webSocket("/?token="+token, "vite-hmr")
	if _, message, err := c.Read(a.t.Context()); err != nil || !strings.Contains(string(message), "connected") {
		a.t.Errorf("hot reload said %q, %v", message, err)
	}
}

func testNext(a *application) {
	say := func(word string) {
		page, _ := a.visit("GET", "/", "", "", 200)
		action := a.find(page, `name="(\$ACTION_ID_[0-9a-f]+)"`)
		body := "--b\r\nContent-Disposition: form-data; name=\"" + action + "\"\r\n\r\n\r\n" +
			"--b\r\nContent-Disposition: form-data; name=\"word\"\r\n\r\n" + word + "\r\n--b--\r\n"
		a.visit("POST", "/", "multipart/form-data; boundary=b", body, 200)
		if page, _ = a.visit("GET", "/", "", "", 200); !strings.Contains(page, word) {
			a.t.Errorf("the Server Action did nothing: %.4000s", page)
		}
	}
	say("as-the-preview")
	a.webSocket("/_next/hmr?id=1")
	say("as-localhost")
}

func testDjango(a *application) {
	if got, _ := a.post("/hook", "", 200); got != "hooked" {
		a.t.Errorf("a webhook that comes first: %q", got)
	}
	token, _ := a.visit("GET", "/", "", "", 200)
	if got, _ := a.post("/", "csrfmiddlewaretoken="+token, 200); got != "posted to http://localhost:"+strconv.Itoa(a.port)+"/" {
		a.t.Errorf("got %q", got)
	}
}

func testDjangoBehindAProxy(a *application) {
	token, header := a.visit("GET", "/", "", "", 200)
	if cookie := header.Get("Set-Cookie"); !strings.Contains(cookie, "Secure") {
		a.t.Errorf("the cookie %q is not secure", cookie)
	}
	if got, _ := a.post("/", "csrfmiddlewaretoken="+token, 200); got != "posted to "+a.origin+"/" {
		a.t.Errorf("got %q", got)
	}
}

func testRailsInDevelopment(a *application) {
	testRails(a, "http://localhost:"+strconv.Itoa(a.port))
}

func testRailsInProduction(a *application) {
	header := testRails(a, a.origin)
	if cookie := header.Get("Set-Cookie"); !strings.Contains(cookie, "; secure") {
		a.t.Errorf("the cookie %q is not secure", cookie)
	}
}

// testRails logs in to an application that builds its URLs from base. It
// returns the header of the response to the form.
func testRails(a *application, base string) http.Header {
	a.t.Helper()
	token, _ := a.visit("GET", "/", "", "", 200)
	form := url.Values{"authenticity_token": {token}}.Encode()
	_, header := a.post("/login", form, 302)
	if to := header.Get("Location"); to != a.origin+"/me" {
		a.t.Errorf("the visitor goes to %s, want %s/me", to, a.origin)
	}
	if got, _ := a.visit("GET", "/me", "", "", 200); got != "user alice at "+base {
		a.t.Errorf("got %q, want user alice at %s", got, base)
	}
	a.post("/login", "", 422) // without the token

	const cable = "actioncable-v1-json"
	c := a.webSocket("/cable", cable)
	if _, message, err := c.Read(a.t.Context()); err != nil || !strings.Contains(string(message), "welcome") {
		a.t.Errorf("Action Cable said %q, %v", message, err)
	}
	a.refuseForeignWebSocket("/cable", 404, cable)
	return header
}

// testCodeServer opens the page and begins the handshake that the page makes
// with the server of VS Code.
func testCodeServer(a *application) {
	page, _ := a.visit("GET", "/", "", "", 200)
	path := "/" + a.find(page, `'(stable-[0-9a-f]+)/static'`) +
		"?reconnectionToken=b7a3c1de-0000-4000-8000-000000000001&reconnection=false&skipWebSocketFrames=false"
	c := a.webSocket(path)
	const control = 2
	request := []byte(`{"type":"auth","auth":"00000000000000000000","data":"x"}`)
	message := append([]byte{control}, make([]byte, 8)...) // the ids of the message and of what it acknowledges
	message = binary.BigEndian.AppendUint32(message, uint32(len(request)))
	if err := c.Write(a.t.Context(), websocket.MessageBinary, append(message, request...)); err != nil {
		a.t.Fatal(err)
	}
	if _, got, err := c.Read(a.t.Context()); err != nil || !strings.Contains(string(got), `"type":"sign"`) {
		a.t.Errorf("the server of VS Code said %q, %v", got, err)
	}
	a.refuseForeignWebSocket(path, 403)
}

func testSession(a *application) {
	a.visit("GET", "/form", "", "", 200)
	_, header := a.post("/login", "x=1", 302)
	if cookie := header.Get("Set-Cookie"); !strings.Contains(cookie, "Secure") {
		a.t.Errorf("the cookie %q is not secure", cookie)
	}
	if got, _ := a.visit("GET", "/me", "", "", 200); got != "user alice" {
		a.t.Errorf("got %q", got)
	}
}

func testOAuth(a *application) {
	_, header := a.visit("GET", "/oauth", "", "", 302)
	to, err := url.Parse(header.Get("Location"))
	if err != nil {
		a.t.Fatal(err)
	}
	if back := to.Query().Get("redirect_uri"); to.Host != "login.example" || back != a.origin+"/callback" {
		a.t.Errorf("the visitor goes to %s and comes back to %s, want %s/callback", to, back, a.origin)
	}
}
