package terminalpage

import (
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func get(t *testing.T, method, url string) *http.Response {
	t.Helper()
	mux := http.NewServeMux()
	Register(mux, http.NotFound)
	rec := httptest.NewRecorder()
	mux.ServeHTTP(rec, httptest.NewRequest(method, url, nil))
	return rec.Result()
}

func readAll(t *testing.T, resp *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestPageIsTheSameForAllSandboxes(t *testing.T) {
	for _, name := range []string{"shop", "assets", "does-not-exist"} {
		resp := get(t, "GET", Path+name)
		body := readAll(t, resp)
		if resp.StatusCode != http.StatusOK || body != string(page) || resp.Header.Get("Cache-Control") != "no-cache" {
			t.Errorf("%s: %d, %v", name, resp.StatusCode, resp.Header)
		}
	}
	for _, url := range []string{Path, Path + "shop/", Path + "shop/x"} {
		if resp := get(t, "GET", url); resp.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %d", url, resp.StatusCode)
		}
	}
}

func TestPageLoadsOnlyItsOwnFiles(t *testing.T) {
	urls := regexp.MustCompile(`(?:src|href)="([^"]*)"`).FindAllStringSubmatch(string(page), -1)
	if len(urls) < 4 {
		t.Fatalf("the page has %d URLs", len(urls))
	}
	var scripts []string
	for _, url := range urls {
		if !strings.HasPrefix(url[1], assetsPath) || get(t, "GET", url[1]).StatusCode != http.StatusOK {
			t.Errorf("%s is not a file of the page", url[1])
		}
		if strings.HasSuffix(url[1], ".js") {
			scripts = append(scripts, url[1])
		}
	}
	for _, script := range scripts {
		for _, imported := range regexp.MustCompile(`(?m)^import .* from "(.*)";$`).FindAllStringSubmatch(string(assets[script].content), -1) {
			if url := path.Join(path.Dir(script), imported[1]); get(t, "GET", url).StatusCode != http.StatusOK {
				t.Errorf("%s imports %s", script, url)
			}
		}
	}
	if inline := regexp.MustCompile(`<script>|<style|style="| on[a-z]+="`).FindString(string(page)); inline != "" {
		t.Errorf("the page has %s, which its policy forbids", inline)
	}
}

func TestPageForbidsInlineScriptsFramesAndOtherHosts(t *testing.T) {
	h := get(t, "GET", Path+"shop").Header
	directives := map[string]string{}
	for directive := range strings.SplitSeq(h.Get("Content-Security-Policy"), ";") {
		name, value, _ := strings.Cut(strings.TrimSpace(directive), " ")
		directives[name] = value
	}
	for name, want := range map[string]string{
		"default-src": "'none'", "script-src": "'self'", "connect-src": "'self'", "img-src": "'self'", "base-uri": "'none'",
		"form-action": "'none'", "frame-ancestors": "'none'", "require-trusted-types-for": "'script'", "trusted-types": "'none'",
	} {
		if directives[name] != want {
			t.Errorf("%s is %q, want %q", name, directives[name], want)
		}
	}
	for name, value := range directives {
		if name != "style-src" && strings.Contains(value, "unsafe") {
			t.Errorf("%s is %s", name, value)
		}
	}
	if h.Get("X-Frame-Options") != "DENY" || h.Get("Referrer-Policy") != "no-referrer" || h.Get("Cross-Origin-Opener-Policy") != "same-origin" {
		t.Errorf("got %v", h)
	}
}

func TestFilesAreStoredPermanentlyUnderTheirDigest(t *testing.T) {
	want := map[string]string{".js": "text/javascript; charset=utf-8", ".mjs": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
	for _, url := range slices.Sorted(maps.Keys(assets)) {
		resp := get(t, "GET", url)
		if got := resp.Header.Get("Cache-Control"); got != "public, max-age=31536000, immutable" {
			t.Errorf("%s: %s", url, got)
		}
		if kind := want[path.Ext(url)]; kind != "" && resp.Header.Get("Content-Type") != kind {
			t.Errorf("%s is %s", url, resp.Header.Get("Content-Type"))
		}
		if resp.Header.Get("X-Content-Type-Options") != "nosniff" || readAll(t, resp) != string(assets[url].content) {
			t.Errorf("%s: %v", url, resp.Header)
		}
		if resp := get(t, "GET", assetsPath+"0123456789abcdef/"+path.Base(url)); resp.StatusCode != http.StatusNotFound || resp.Header.Get("Cache-Control") != "" {
			t.Errorf("%s of another version: %d %v", path.Base(url), resp.StatusCode, resp.Header)
		}
	}
	for _, name := range []string{"xterm/xterm.mjs", "xterm/LICENSE.xterm", "xterm/LICENSE.addon-fit", "xterm/LICENSE.addon-unicode11"} {
		if !slices.ContainsFunc(slices.Collect(maps.Keys(assets)), func(url string) bool { return strings.HasSuffix(url, "/"+name) }) {
			t.Errorf("%s is not served", name)
		}
	}
}
