package node

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/doctor"
)

func TestReportHasEveryRemedyAndFailsOnlyIfNoSandboxCouldRun(t *testing.T) {
	tun := doctor.Finding{Name: "tun", Level: doctor.LevelWarning, Detail: "/dev/net/tun cannot be opened", Remedy: "chmod 0666 /dev/net/tun"}
	subIDs := doctor.Finding{Name: "sub-uids", Level: doctor.LevelError, Detail: "none", Remedy: "usermod --add-subuids"}
	podman := doctor.Finding{Name: "podman", Level: doctor.LevelError, Detail: "podman is missing", Remedy: "apt-get install podman"}
	fine := doctor.Finding{Name: "user", OK: true, Level: doctor.LevelInfo, Detail: "runs as doze"}
	for name, c := range map[string]struct {
		findings []doctor.Finding
		errors   []string // nil: no error
		logged   []string
	}{
		"all passed": {[]doctor.Finding{fine}, nil, nil},
		"a warning":  {[]doctor.Finding{fine, tun}, nil, []string{tun.Detail, tun.Remedy}},
		"errors":     {[]doctor.Finding{subIDs, tun, podman}, []string{subIDs.Remedy, podman.Detail, podman.Remedy}, []string{tun.Remedy}},
	} {
		t.Run(name, func(t *testing.T) {
			var log strings.Builder
			err := report(c.findings, slog.New(slog.NewTextHandler(&log, nil)))
			if (err != nil) != (c.errors != nil) {
				t.Fatalf("error %v", err)
			}
			for _, want := range c.errors {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the error lacks %q: %v", want, err)
				}
			}
			for _, want := range c.logged {
				if !strings.Contains(log.String(), want) {
					t.Errorf("the log lacks %q: %s", want, &log)
				}
			}
			if c.logged == nil && log.Len() > 0 {
				t.Errorf("logged %s", &log)
			}
		})
	}
}

func TestTokenIsCreatedOnceAndShortTokensAreRefused(t *testing.T) {
	path := t.TempDir() + "/token"
	first, err := readToken(path)
	if err != nil || len(first) < minToken {
		t.Fatalf("%d characters, error %v", len(first), err)
	}
	if again, err := readToken(path); err != nil || again != first {
		t.Errorf("read again: the same is %v, error %v", again == first, err)
	}
	weak := t.TempDir() + "/weak"
	if err := writeNew(weak, 0o600, []byte("secret\n")); err != nil {
		t.Fatal(err)
	}
	if _, err := readToken(weak); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("a short token: %v", err)
	}
}
