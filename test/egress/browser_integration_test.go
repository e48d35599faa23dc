//go:build integration

package egress

import (
	_ "embed"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/doze-run/doze/api/client"
)

//go:embed testdata/page.html
var page string

// servePage serves a page that loads until it has done what it does.
func servePage(handle func(pattern string, h http.HandlerFunc)) {
	var done sync.Map // of chan string, by host
	handle("/page", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = io.WriteString(w, page)
	})
	handle("/page/done", func(_ http.ResponseWriter, r *http.Request) {
		select {
		case channelOf(&done, r.Host) <- "":
		case <-r.Context().Done():
		}
	})
	handle("/page/end", func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-channelOf(&done, r.Host):
		case <-r.Context().Done():
		}
	})
}

// Each ClientHello of a browser has ECH, so its connections are intercepted, and a browser
// has trust of its own.
func TestChromium(t *testing.T) {
	eachMode(t, "browser", withBearer, func(u *user) {
		// Its own sandbox wants more rights than root has in ours. It looks up no other
		// names, such as the services of its vendor.
		out := u.does("chromium --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage" +
			" --host-resolver-rules='MAP * ~NOTFOUND, EXCLUDE " + u.host + "' --dump-dom " + u.url("/page"))
		if !strings.Contains(out, `<p id="result">h2, asked, echoed</p>`) {
			u.t.Errorf("got %s", out)
		}
		want := map[string]string{"look": "", "pass": "intercepted because its ClientHello has ECH"}[u.zone]
		paths := map[string]bool{}
		for _, f := range u.flows(client.FlowFilter{Host: u.host, Kind: "request"}) {
			if f.Path == "/favicon.ico" { // the browser may end before the response
				continue
			}
			if paths[f.Path] = true; f.Verdict != "allow" || f.Reason != want {
				u.t.Errorf("the audit log has %+v", f)
			}
		}
		for _, f := range u.flows(client.FlowFilter{}) {
			if f.Host != u.host {
				u.t.Errorf("it reached for another host: %+v", f)
			}
		}
		for _, path := range []string{"/page", "/client/", "/page/done"} {
			if !paths[path] {
				u.t.Errorf("the audit log has nothing of %s", path)
			}
		}
	}, withClients)
}
