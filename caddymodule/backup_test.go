package caddymodule

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/doze-run/doze/certstore"
	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/node/backup"
	"github.com/doze-run/doze/testkit"
)

// adminServer serves the route of backups as Caddy's admin endpoint does.
func adminServer(t *testing.T) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := handleBackup(w, r); err != nil {
			failed, _ := errors.AsType[caddy.APIError](err)
			http.Error(w, err.Error(), failed.HTTPStatus)
		}
	}))
	t.Cleanup(server.Close)
	return server
}

func get(t *testing.T, url string) (status int, body []byte) {
	t.Helper()
	res, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body, err = io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, body
}

func TestABackupHasTheCertificates(t *testing.T) {
	s := newStorageSite(t)
	const key = "certificates/local/" + apiHost + "/" + apiHost + ".key"
	want, err := caddy.ActiveContext().Storage().Load(t.Context(), key)
	testkit.NoError(t, "load", err)
	status, b := get(t, adminServer(t).URL)
	if status != http.StatusOK || bytes.Contains(b, want) {
		t.Fatalf("the response has the status %d", status)
	}

	home := filepath.Join(t.TempDir(), "home")
	if contents, err := backup.Restore(bytes.NewReader(b), home); err != nil || !contents.SealingKey {
		t.Fatalf("restored %+v, %v", contents, err)
	}
	records, err := node.OpenStore(home, testkit.NewLog(t).Logger())
	testkit.NoError(t, "open the store", err)
	defer records.Close()
	sealing, err := seal.Open(node.SealingKeyFile(home))
	testkit.NoError(t, "open the sealing key", err)
	restored, err := certstore.Open(t.Context(), certstore.Config{Store: records, Key: sealing, Folder: filepath.Join(home, "caddy")})
	testkit.NoError(t, "open the storage", err)
	if got, err := restored.Load(t.Context(), key); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the restored key has %d bytes, %v; want %d", len(got), err, len(want))
	}
	have, err := os.ReadFile(filepath.Join(home, rootFile))
	testkit.NoError(t, "read the root", err)
	if want, err := os.ReadFile(filepath.Join(s.home, rootFile)); err != nil || !bytes.Equal(have, want) {
		t.Errorf("the root differs, %v", err)
	}
}

func TestABackupOmitsTheKeyOnRequest(t *testing.T) {
	newStorageSite(t)
	server := adminServer(t)
	_, b := get(t, server.URL+"?without_key=true")
	if contents, err := backup.Check(bytes.NewReader(b)); err != nil || contents.SealingKey || contents.Files > 0 {
		t.Errorf("got %+v, %v", contents, err)
	}
	if status, b := get(t, server.URL+"?without_key=perhaps"); status != http.StatusBadRequest {
		t.Errorf("got %d %s", status, b)
	}
	res, err := http.Post(server.URL, "", nil)
	testkit.NoError(t, "post", err)
	res.Body.Close()
	if res.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("POST: got %d", res.StatusCode)
	}
}

func TestABackupNeedsANode(t *testing.T) {
	if status, b := get(t, adminServer(t).URL); status != http.StatusServiceUnavailable || !strings.Contains(string(b), errNotOpen.Error()) {
		t.Errorf("got %d %s", status, b)
	}
}

// stalledWriter is a response whose client reads nothing, until the write deadline.
type stalledWriter struct {
	http.ResponseWriter
	stalled chan struct{}
	ended   context.Context
}

func (w stalledWriter) Write([]byte) (int, error) {
	close(w.stalled)
	<-w.ended.Done()
	return 0, os.ErrDeadlineExceeded
}

// A client that stalls must not prevent the end of the node, which waits for all readers of
// its store.
func TestTheEndOfTheNodeEndsABackup(t *testing.T) {
	s := newStorageSite(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w := stalledWriter{httptest.NewRecorder(), make(chan struct{}), ctx}
	ended := make(chan any, 1)
	go func() {
		defer func() { ended <- recover() }()
		handleBackup(w, httptest.NewRequest("GET", "/doze/backup", nil))
	}()
	testkit.Closed(t, "the response begins", w.stalled)
	defer context.AfterFunc(s.node.Requests(), cancel)()
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	if got := testkit.Receive(t, "the backup ends", ended); got != http.ErrAbortHandler {
		t.Errorf("the handler ended with %v", got)
	}
}
