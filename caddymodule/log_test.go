package caddymodule

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// brokenApp breaks off its responses in several ways.
func brokenApp(w http.ResponseWriter, r *http.Request) {
	conn, out, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer conn.Close()
	fmt.Fprint(out, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Secret\r\n\r\n5\r\nhello\r\n")
	switch r.URL.Path {
	case "/chunk":
		fmt.Fprint(out, "canary-chunk\r\n")
	case "/trailer":
		fmt.Fprint(out, "0\r\ncanary-trailer\r\n\r\n")
	}
	out.Flush()
}

// canaries of requests by visitBroken and responses of brokenApp.
var canaries = []string{"canary-query", "canary-referer", "canary-cookie", "canary-header", "canary-chunk", "canary-trailer"}

// visitBroken requests all of brokenApp, with a canary wherever a visitor's secrets are.
func (s *site) visitBroken(address string) {
	s.t.Helper()
	for _, h2 := range []bool{false, true} {
		for _, path := range []string{"close", "chunk", "trailer"} {
			req, err := http.NewRequestWithContext(s.t.Context(), "GET", address+path+"?key=canary-query", nil)
			if err != nil {
				s.t.Fatal(err)
			}
			req.Header.Set("Referer", "https://example.com/?canary-referer")
			req.Header.Set("Cookie", "a=canary-cookie")
			req.Header.Set("X-Key", "canary-header")
			res, err := s.client(h2).Do(req)
			if err != nil {
				continue // HTTP/1.1 clients see some of them as no response
			}
			if _, err := io.ReadAll(res.Body); err == nil {
				s.t.Errorf("%s: the response is whole", path)
			}
			res.Body.Close()
		}
	}
}

// logged returns what a log contains once it contains want.
func logged(t *testing.T, file, want string) string {
	t.Helper()
	var text []byte
	testkit.Eventually(t, fmt.Sprintf("%q is in the log", want), func() bool {
		text, _ = os.ReadFile(file)
		return strings.Contains(string(text), want)
	})
	return string(text)
}

func TestLogsShowNothingOfPreviewsThatGivesAccess(t *testing.T) {
	// Not Caddy's events: at DEBUG, Caddy 2.11 copies its app tls for them while that
	// starts, which the race detector finds (caddyevents.App.Emit, caddytls.TLS.Start).
	const debug = "level DEBUG\nexclude events\n"
	for name, options := range map[string]string{
		"as Caddy writes it":    "",
		"debug, with `doze`":    debug + "format doze",
		"debug, console format": debug + "format doze {\n wrap console\n}",
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			file := filepath.Join(t.TempDir(), "node.log")
			s.global = fmt.Sprintf("log all {\noutput file %s\n%s\n}", file, options)
			s.mustLoad("", "*.other.localhost {\ntls internal\nlog\ndoze_preview {\ndomain other.localhost\n}\n}")
			s.awaitCertificate("any.other.localhost")
			sb, address := s.sandbox(brokenApp, sandbox.Port{})
			s.visitBroken(address)
			s.visitBroken(strings.Replace(address, defaultPreviewDomain, "other.localhost", 1))
			text := logged(t, file, "aborting with incomplete response")
			for _, canary := range append(canaries, sb.Ports[0].Token, testToken) {
				if at := strings.Index(text, canary); at >= 0 {
					t.Errorf("%s is in the log: %s", canary, text[max(0, at-600):min(len(text), at+100)])
				}
			}
			if !strings.Contains(text, string(sb.ID)) {
				t.Error("the log does not name the sandbox")
			}
			if warned := strings.Contains(text, "log format without redaction configured"); warned != (options == "") {
				t.Errorf("the node warned of the log format: %v", warned)
			}
		})
	}
}

func TestTheStandardLoggerShowsNothingThatItQuotes(t *testing.T) {
	s := newSite(t)
	file := filepath.Join(t.TempDir(), "node.log")
	s.global = fmt.Sprintf("log all {\noutput file %s\n}", file)
	s.mustLoad("", "")
	log.Printf("Unsolicited response received on idle HTTP channel starting with %q", "canary-upstream")
	s.mustLoad("sleep_after 5m", "")
	log.Printf("http2: invalid header: %s", "canary-upstream")
	logged(t, file, "Unsolicited response received on idle HTTP channel")
	if text := logged(t, file, "http2: invalid header"); strings.Contains(text, "canary-upstream") {
		t.Errorf("the log shows what a library quoted:\n%s", text)
	}
}
