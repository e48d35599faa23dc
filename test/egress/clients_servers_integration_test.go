//go:build integration

package egress

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/cgi"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/doze-run/doze/egress/rule/preset"
	"github.com/doze-run/doze/test/egress/rpc"
)

// gitUser is the user of the test's policy basic.
const gitUser = "git"

// authorized reports whether a request has the credential of its host: where the node
// intercepts requests, the secret that a policy adds and no sandbox has.
func authorized(host, authorization string) bool {
	if !strings.HasSuffix(host, ".look.test") {
		return true
	}
	basic := base64.StdEncoding.EncodeToString([]byte(gitUser + ":" + token))
	return authorization == "Bearer "+token || authorization == "Basic "+basic
}

// serveClients adds what the tests of clients ask for.
func (s *servers) serveClients(mux *http.ServeMux) {
	handle := func(pattern string, h http.HandlerFunc) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if list := r.Header["Authorization"]; len(list) > 1 || !authorized(r.Host, r.Header.Get("Authorization")) {
				w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
				http.Error(w, "no credential", http.StatusUnauthorized)
				return
			}
			h(w, r)
		})
	}
	handle("/client/", s.reflect)
	handle("/blob", blob)
	handle("/digest", digest)
	handle("/too-big", func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "too big", http.StatusRequestEntityTooLarge)
	})
	handle("/until-closed", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "to the ")
		_ = http.NewResponseController(w).Flush() // or it would have a length
		_, _ = io.WriteString(w, "end")
	})
	handle("/trailers", trailers)
	handle("/websocket", echoMessages)
	mux.HandleFunc("/open/websocket", echoMessages)
	var acks sync.Map // of chan string, by host
	handle("/events", func(w http.ResponseWriter, r *http.Request) { events(w, r, channelOf(&acks, r.Host)) })
	handle("/events/ack", func(_ http.ResponseWriter, r *http.Request) {
		select {
		case channelOf(&acks, r.Host) <- r.URL.RawQuery:
		case <-r.Context().Done():
		}
	})
	servePage(handle)
	handle("/git/", s.git)
	for _, w := range modes {
		handle(w.host("npm")+"/", npmRegistry)
		handle(w.host("pypi")+"/", pythonIndex)
	}
}

// presetHost is the first of a preset.
func presetHost(name string) string {
	list := preset.All()
	return list[slices.IndexFunc(list, func(p preset.Preset) bool { return p.Name == name })].Hosts[0]
}

func channelOf(m *sync.Map, host string) chan string {
	c, _ := m.LoadOrStore(host, make(chan string))
	return c.(chan string)
}

// block is what large bodies repeat: nothing that compresses.
var block = func() []byte {
	b := make([]byte, 1<<20)
	_, _ = rand.NewChaCha8([32]byte{}).Read(b) // it never fails
	return b
}()

// blob sends as many bytes as it is asked for.
func blob(w http.ResponseWriter, r *http.Request) {
	size, err := strconv.Atoi(r.URL.Query().Get("size"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Length", strconv.Itoa(size))
	for size > 0 {
		n, err := w.Write(block[:min(size, len(block))])
		if size -= n; err != nil {
			return
		}
	}
}

// blobDigest is the SHA-256 of a body of that size.
func blobDigest(size int) string {
	h := sha256.New()
	for ; size > 0; size -= len(block) {
		h.Write(block[:min(size, len(block))])
	}
	return hex.EncodeToString(h.Sum(nil))
}

// received is digest's description of a body.
type received struct {
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
	Length int64  `json:"length"` // as announced, or -1
	Expect string `json:"expect"`
}

// digest reads a body and responds with its hash and size.
func digest(w http.ResponseWriter, r *http.Request) {
	h := sha256.New()
	size, err := io.Copy(h, r.Body)
	if err != nil {
		return // the client or the node reports it
	}
	_ = json.NewEncoder(w).Encode(received{size, hex.EncodeToString(h.Sum(nil)), r.ContentLength, r.Header.Get("Expect")})
}

// trailers echoes the body, and then the request's trailer as its own.
func trailers(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Trailer", "X-Got")
	_, _ = io.Copy(w, r.Body)
	w.Header().Set("X-Got", r.Trailer.Get("X-Sent"))
}

// events sends five, each when the previous one was acknowledged.
func events(w http.ResponseWriter, r *http.Request, acks <-chan string) {
	w.Header().Set("Content-Type", "text/event-stream")
	for i := range 5 {
		fmt.Fprintf(w, "data: %d\n\n", i)
		if err := http.NewResponseController(w).Flush(); err != nil {
			return
		}
		select {
		case id := <-acks:
			if id != strconv.Itoa(i) {
				return
			}
		case <-r.Context().Done():
			return
		}
	}
}

// echoMessages is a WebSocket that ends when it receives "bye".
func echoMessages(w http.ResponseWriter, r *http.Request) {
	c, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{"echo"}, CompressionMode: websocket.CompressionContextTakeover})
	if err != nil {
		return
	}
	defer c.CloseNow()
	c.SetReadLimit(2 << 20)
	for {
		kind, data, err := c.Read(r.Context())
		if err != nil {
			return
		}
		if string(data) == "bye" {
			_ = c.Close(4321, "as you wish")
			return
		}
		if err := c.Write(r.Context(), kind, data); err != nil {
			return
		}
	}
}

// git serves the repositories in s.repositories.
func (s *servers) git(w http.ResponseWriter, r *http.Request) {
	path, err := exec.Command("git", "--exec-path").Output()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	h := cgi.Handler{
		Path: filepath.Join(strings.TrimSpace(string(path)), "git-http-backend"),
		Root: "/git",
		// REMOTE_USER may push.
		Env: []string{"GIT_PROJECT_ROOT=" + s.repositories, "GIT_HTTP_EXPORT_ALL=1", "REMOTE_USER=" + gitUser},
	}
	r.TransferEncoding = nil // package cgi refuses chunks, though they are decoded by now
	h.ServeHTTP(w, r)
}

// npmPackage is a package as npm packs one.
var npmPackage = sync.OnceValue(func() []byte {
	var packed bytes.Buffer
	zipped := gzip.NewWriter(&packed)
	w := tar.NewWriter(zipped)
	for _, f := range [][2]string{
		{"package/package.json", `{"name":"dozing","version":"1.0.0","main":"index.js"}`},
		{"package/index.js", `module.exports = "dozing from npm"`},
	} {
		mustWrite(w.WriteHeader(&tar.Header{Name: f[0], Mode: 0o644, Size: int64(len(f[1]))}))
		_, err := io.WriteString(w, f[1])
		mustWrite(err)
	}
	mustWrite(w.Close())
	mustWrite(zipped.Close())
	return packed.Bytes()
})

// mustWrite panics on errors of writing to memory, which has none.
func mustWrite(err error) {
	if err != nil {
		panic(err)
	}
}

// npmRegistry has the package dozing.
func npmRegistry(w http.ResponseWriter, r *http.Request) {
	const file = "/dozing/-/dozing-1.0.0.tgz"
	switch r.URL.Path {
	case "/dozing":
		sum := sha512.Sum512(npmPackage())
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{
			"name": "dozing", "dist-tags": map[string]string{"latest": "1.0.0"},
			"versions": map[string]any{"1.0.0": map[string]any{
				"name": "dozing", "version": "1.0.0",
				"dist": map[string]string{"tarball": "https://" + r.Host + file, "integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:])},
			}},
		})
	case file:
		http.ServeContent(w, r, "dozing.tgz", time.Time{}, bytes.NewReader(npmPackage()))
	default: // advisories and the like
		http.NotFound(w, r)
	}
}

// wheel is a package as pip installs one.
var wheel = sync.OnceValue(func() []byte {
	var packed bytes.Buffer
	w := zip.NewWriter(&packed)
	for _, f := range [][2]string{
		{"dozing.py", "name = 'dozing from the index'\n"},
		{"dozing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: dozing\nVersion: 1.0\n"},
		{"dozing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{"dozing-1.0.dist-info/RECORD", "dozing.py,,\ndozing-1.0.dist-info/METADATA,,\ndozing-1.0.dist-info/WHEEL,,\ndozing-1.0.dist-info/RECORD,,\n"},
	} {
		entry, err := w.Create(f[0])
		mustWrite(err)
		_, err = io.WriteString(entry, f[1])
		mustWrite(err)
	}
	mustWrite(w.Close())
	return packed.Bytes()
})

// pythonIndex has the package dozing.
func pythonIndex(w http.ResponseWriter, r *http.Request) {
	const file = "/files/dozing-1.0-py3-none-any.whl"
	switch r.URL.Path {
	case "/simple/dozing/":
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, `<!DOCTYPE html><a href="%s#sha256=%x">%s</a>`, file, sha256.Sum256(wheel()), filepath.Base(file))
	case file:
		http.ServeContent(w, r, "dozing.whl", time.Time{}, bytes.NewReader(wheel()))
	default:
		http.NotFound(w, r)
	}
}

// startCalls serves gRPC, by grpc-go's own HTTP/2.
func (s *servers) startCalls(certificate tls.Certificate) (err error) {
	if s.callsListener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return err
	}
	s.calls = grpc.NewServer(
		grpc.Creds(credentials.NewServerTLSFromCert(&certificate)),
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			if err := authorizedCall(ctx); err != nil {
				return nil, err
			}
			return next(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			if err := authorizedCall(stream.Context()); err != nil {
				return err
			}
			return next(srv, stream)
		}),
	)
	rpc.Serve(s.calls)
	go s.calls.Serve(s.callsListener) // ends in close
	return nil
}

func authorizedCall(ctx context.Context) error {
	md, _ := metadata.FromIncomingContext(ctx)
	host, authorization := md.Get(":authority"), append(md.Get("authorization"), "")
	if len(host) != 1 || !authorized(strings.TrimSuffix(host[0], ":443"), authorization[0]) {
		return status.Error(codes.Unauthenticated, "no credential")
	}
	return nil
}
