//go:build integration

package browser_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/test/testnode"
)

// testSignedURLs: a page of another origin uploads and downloads a file by signed URLs, and
// wakes the sandbox with them. A page that a sandbox wrote gets no script in the API's
// origin.
func testSignedURLs(t *testing.T, n *testnode.Node, browser context.Context) {
	page := create(t, n, types.CreateSandboxRequest{Name: "page"})
	page.write("/srv/index.html", "<title>upload</title>")
	page.run("/srv", "python3", "-m", "http.server", "8000")
	target := create(t, n, types.CreateSandboxRequest{Name: "target"})
	sign := func(req types.SignFileURLRequest) string {
		t.Helper()
		signed, err := n.API.SignFileURL(t.Context(), target.id, req)
		if err != nil {
			t.Fatal(err)
		}
		return signed.URL
	}
	upload := sign(types.SignFileURLRequest{Path: "/srv/größe.txt", Operation: types.FileOperationWrite, MaxBytes: 100})
	download := sign(types.SignFileURLRequest{Path: "/srv/größe.txt"})

	p := openTab(t, browser)
	p.open(page.expose(8000))
	target.stop()
	call := func(address, options string) string {
		t.Helper()
		quoted, err := json.Marshal(address)
		if err != nil {
			t.Fatal(err)
		}
		evaluate[bool](p, fmt.Sprintf(`(window.result = undefined, fetch(%s, %s).then(async r =>
			window.result = [r.status, r.headers.get("Doze-Error"), r.headers.get("Content-Disposition"), r.headers.get("ETag") !== null, (await r.text()).slice(0, 9)].join(" "),
			e => window.result = "failed: " + e), true)`, quoted, options))
		p.waitFor("window.result !== undefined")
		return evaluate[string](p, "window.result")
	}
	const file = `{method: "PUT", body: new File(["from a browser"], "x.txt", {type: "text/plain"})}`
	for _, tt := range []struct{ name, address, options, want string }{
		{"upload, which wakes the sandbox", upload, file, `200   true {"name":"`},
		{"download", download, `{}`, `200  attachment; filename*=utf-8''gr%C3%B6%C3%9Fe.txt true from a br`},
		{"a range", download, `{headers: {Range: "bytes=7-"}}`, `206  attachment; filename*=utf-8''gr%C3%B6%C3%9Fe.txt true browser`},
		{"too large", upload, `{method: "PUT", body: "x".repeat(101)}`, `413 body_too_large  false {"type":"`},
		{"changed", upload + "0", file, `403 signature_invalid  false {"type":"`},
		{"with cookies", download, `{credentials: "include"}`, `failed: TypeError: Failed to fetch`},
		{"with a token", n.URL("/sandbox/target/files/read?path=/srv/index.html"), `{headers: {Authorization: "Bearer ` + n.Token + `"}}`, `failed: TypeError: Failed to fetch`},
	} {
		if got := call(tt.address, tt.options); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}

	target.write("/srv/hostile.html", `<title>safe</title><script>document.title = "hostile"</script>`)
	response := p.open(sign(types.SignFileURLRequest{Path: "/srv/hostile.html", Disposition: types.DispositionInline}))
	if title := evaluate[string](p, "document.title + ' ' + self.origin"); response.Status != http.StatusOK || title != "safe null" {
		t.Errorf("a page of a sandbox: status %d, %q", response.Status, title)
	}
}
