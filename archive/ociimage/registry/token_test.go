package registry

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/doze-run/doze/archive/ociimage"
	"github.com/doze-run/doze/testkit"
)

// tokenServer requires a token for the API of a registry, as Docker Hub and most others do, and issues
// it for a user with the password secret. It has no blobs and stores none.
type tokenServer struct {
	*httptest.Server
	mu     sync.Mutex
	scopes []string // of the tokens that were requested
	pushed []string // paths of manifests
}

func newTokenServer(t *testing.T, denied bool) *tokenServer {
	t.Helper()
	s := &tokenServer{}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /token", func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != "pusher" || password != "secret" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		s.mu.Lock()
		s.scopes = append(s.scopes, r.URL.Query()["scope"]...)
		s.mu.Unlock()
		fmt.Fprint(w, `{"token":"issued"}`)
	})
	mux.HandleFunc("/v2/", func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Header.Get("Authorization") != "Bearer issued":
			scope := "pull,push"
			if r.Method == http.MethodHead {
				scope = "pull"
			}
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="%s/token",service="test",scope="repository:team/shop:%s"`, s.URL, scope))
			w.WriteHeader(http.StatusUnauthorized)
		case denied:
			w.WriteHeader(http.StatusForbidden)
		case r.Method == http.MethodHead:
			w.WriteHeader(http.StatusNotFound)
		case r.Method == http.MethodPost:
			w.Header().Set("Location", r.URL.Path+"1")
			w.WriteHeader(http.StatusAccepted)
		default:
			if strings.Contains(r.URL.Path, "/manifests/") {
				s.mu.Lock()
				s.pushed = append(s.pushed, r.URL.Path)
				s.mu.Unlock()
			}
			w.WriteHeader(http.StatusCreated)
		}
	})
	s.Server = httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s
}

// push pushes an image without layers to the server.
func (s *tokenServer) push(t *testing.T, u userFolders) (host string, err error) {
	t.Helper()
	var archive bytes.Buffer
	testkit.NoError(t, "write the archive", ociimage.Write(&archive, ociimage.Image{Name: "localhost/shop:1", Config: []byte("{}")}))
	host = strings.TrimPrefix(s.URL, "http://")
	r, err := Open(testkit.Context(t), Config{Reference: Reference{host, "team/shop", "1"}, Getenv: u.getenv})
	testkit.NoError(t, "open", err)
	defer r.Close()
	_, err = r.Push(testkit.Context(t), &archive)
	return host, err
}

func TestOneTokenServesAPush(t *testing.T) {
	u, s := newUser(t), newTokenServer(t, false)
	write(t, filepath.Join(u.env["HOME"], ".docker", "config.json"), auths(strings.TrimPrefix(s.URL, "http://"), "pusher"))
	_, err := s.push(t, u)
	testkit.NoError(t, "push", err)
	if !slices.Equal(s.scopes, []string{"repository:team/shop:pull,push"}) || !slices.Equal(s.pushed, []string{"/v2/team/shop/manifests/1"}) {
		t.Errorf("requested tokens for %q, pushed %q", s.scopes, s.pushed)
	}
}

func TestRefusedTokenIsExplained(t *testing.T) {
	u, s := newUser(t), newTokenServer(t, false)
	host, err := s.push(t, u)
	if want := host + " does not permit the push to team/shop: no credentials for " + host; err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("without credentials: %v, want %s", err, want)
	}
	file := write(t, filepath.Join(u.env["HOME"], ".docker", "config.json"), auths(host, "other"))
	if _, err := s.push(t, u); err == nil || !strings.Contains(err.Error(), "it refused user other of "+file) {
		t.Errorf("as another user: %v", err)
	}
	s = newTokenServer(t, true)
	host = strings.TrimPrefix(s.URL, "http://")
	write(t, file, auths(host, "pusher"))
	if _, err := s.push(t, u); err == nil || !strings.Contains(err.Error(), host+" does not permit the push to team/shop: it refused user pusher of "+file) {
		t.Errorf("as a user who may only pull: %v", err)
	}
}
