//go:build integration

package registrytest

import (
	"net/http"
	"testing"

	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestRegistryRequiresItsUser(t *testing.T) {
	s := Start(t)
	for password, want := range map[string]int{s.Password: http.StatusOK, "wrong": http.StatusUnauthorized} {
		req, err := http.NewRequestWithContext(testkit.Context(t), http.MethodGet, "http://"+s.Host+"/v2/", nil)
		testkit.NoError(t, "request", err)
		req.SetBasicAuth(s.User, password)
		req.Close = true
		res, err := http.DefaultClient.Do(req)
		testkit.NoError(t, "get", err)
		res.Body.Close()
		if res.StatusCode != want {
			t.Errorf("password %s: status %d, want %d", password, res.StatusCode, want)
		}
	}
}

// The registry must not outlive a test process that was killed.
func TestRegistryEndsWhenStdinIsClosed(t *testing.T) {
	s := Start(t)
	testkit.NoError(t, "close stdin", s.stdin.Close())
	testkit.Closed(t, "process ends", s.exited)
	if code := s.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}
