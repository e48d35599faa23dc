// Package terminalpage serves a page with a terminal of a sandbox for browsers. The page
// is static: it logs in and connects through the API, so serving it needs no token and
// reveals nothing about sandboxes.
package terminalpage

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"html/template"
	"io/fs"
	"net/http"
	"path"
	"strconv"
)

const (
	// Path is the path of the page of a sandbox, without the sandbox's name.
	Path = "/terminal/"
	// assetsPath has one part more than pages, so no name of a sandbox collides with it.
	assetsPath = Path + "assets/"
)

// xterm.js is vendored without changes: update-xterm renews it.
//
//go:embed assets/*.js assets/*.css assets/*.svg assets/xterm/*.mjs assets/xterm/*.css assets/xterm/LICENSE.*
var embedded embed.FS

//go:embed page.html
var pageSource string

// asset is one file. Its path contains the digest of all files, which refer to each other
// by relative paths, so a client can store it permanently.
type asset struct {
	contentType string
	content     []byte
}

var (
	assets = map[string]asset{} // by their path in URLs
	page   []byte
)

func init() {
	folder, err := fs.Sub(embedded, "assets")
	must(err)
	files := map[string][]byte{}
	sum := sha256.New()
	must(fs.WalkDir(folder, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(folder, name)
		files[name] = content
		sum.Write([]byte(name + "\x00" + strconv.Itoa(len(content)) + "\x00"))
		sum.Write(content)
		return err
	}))
	base := assetsPath + hex.EncodeToString(sum.Sum(nil)[:8]) + "/"
	for name, content := range files {
		assets[base+name] = asset{contentTypeOf(name), content}
	}
	var b bytes.Buffer
	must(template.Must(template.New("page").Parse(pageSource)).Execute(&b, base))
	page = b.Bytes()
}

func must(err error) {
	if err != nil {
		panic(err) // a mistake in the embedded files
	}
}

// contentTypeOf does not depend on the MIME types of the host.
func contentTypeOf(name string) string {
	switch path.Ext(name) {
	case ".js", ".mjs":
		return "text/javascript; charset=utf-8"
	case ".css":
		return "text/css; charset=utf-8"
	case ".svg":
		return "image/svg+xml"
	}
	return "text/plain; charset=utf-8"
}

// policy permits what the page needs and nothing from elsewhere. xterm.js creates style
// elements; script is never inline, and never made from text.
const policy = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// Register adds the routes of the page and its files to mux. notFound responds to requests
// for other files, such as another version's.
func Register(mux *http.ServeMux, notFound http.HandlerFunc) {
	mux.HandleFunc("GET "+Path+"{id}", servePage)
	mux.HandleFunc("GET "+assetsPath+"{file...}", func(w http.ResponseWriter, r *http.Request) {
		file, ok := assets[r.URL.Path]
		if !ok {
			notFound(w, r)
			return
		}
		w.Header().Set("Cache-Control", "public, max-age=31536000, immutable")
		write(w, file.contentType, file.content)
	})
}

func servePage(w http.ResponseWriter, _ *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("X-Frame-Options", "DENY") // for browsers without frame-ancestors
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-cache")
	write(w, "text/html; charset=utf-8", page)
}

func write(w http.ResponseWriter, contentType string, content []byte) {
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("Content-Length", strconv.Itoa(len(content)))
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("X-Content-Type-Options", "nosniff")
	w.Write(content)
}
