//go:build !race

package registry

import (
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/doze-run/doze/archive/ociimage"
	"github.com/doze-run/doze/testkit"
)

// TestMemoryOfAPushIsBounded: it does not depend on the size of a layer.
func TestMemoryOfAPushIsBounded(t *testing.T) {
	const (
		size    = 256 << 20
		maximum = 16 << 20
	)
	read, respond := make(chan struct{}), make(chan struct{})
	// It stores nothing, so that the memory is the client's.
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.Method {
		case http.MethodHead:
			w.WriteHeader(http.StatusNotFound)
		case http.MethodPost:
			w.Header().Set("Location", r.URL.Path+"1")
			w.WriteHeader(http.StatusAccepted)
		case http.MethodPut:
			if n, _ := io.Copy(io.Discard, r.Body); n >= size {
				close(read)
				<-respond
			}
			w.WriteHeader(http.StatusCreated)
		}
	}))
	defer server.Close()
	u := newUser(t)
	u.env["TMPDIR"] = t.TempDir()
	layer, err := ociimage.Measure(func(w io.Writer) error {
		_, err := io.CopyN(w, rand.NewChaCha8([32]byte{}), size)
		return err
	})
	testkit.NoError(t, "measure", err)
	r, err := Open(testkit.Context(t), Config{Reference: Reference{strings.TrimPrefix(server.URL, "http://"), "shop", "1"}, Getenv: u.getenv})
	testkit.NoError(t, "open", err)
	defer r.Close()
	pushed := make(chan error, 1)
	grown := testkit.HeapGrowth(t, func() {
		in, out := io.Pipe()
		go func() { // ends with the push
			out.CloseWithError(ociimage.Write(out, ociimage.Image{Name: "shop", Config: []byte("{}"), Layers: []ociimage.Layer{layer}}))
		}()
		go func() {
			_, err := r.Push(testkit.Context(t), in)
			in.CloseWithError(err)
			pushed <- err
		}()
		testkit.Closed(t, "the layer is uploaded", read)
	})
	close(respond)
	testkit.NoError(t, "push", testkit.Receive(t, "the push ends", pushed))
	if grown > maximum {
		t.Errorf("memory grew by %d bytes, want at most %d", grown, maximum)
	}
}
