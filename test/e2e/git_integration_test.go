//go:build integration

package e2e

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// newOrigin makes a repository in the sandbox whose transfer begins with a line to
// /srv/begun, and goes on with one from /srv/go. It returns the address.
func (b *box) newOrigin() string {
	b.t.Helper()
	b.exec(`git init -q -b main /srv/origin; cd /srv/origin; git config user.name agent; git config user.email agent@example.com
		for i in $(seq 100); do echo $i >$i; done; git add .; git commit -qm first
		mkfifo /srv/begun /srv/go; printf '#!/bin/sh\necho >/srv/begun; cat /srv/go >/dev/null; exec "$@"\n' >/srv/hook; chmod +x /srv/hook
		git config --global uploadpack.packObjectsHook /srv/hook`)
	return "file:///srv/origin"
}

// clone clones a repository to /srv/shop.
func (b *box) clone(url string) <-chan error {
	ended := make(chan error, 1)
	go func() {
		head, err := b.node.API.CloneRepository(testkit.Context(b.t), b.id, types.GitCloneRequest{URL: url, TargetDir: "/srv/shop"}, nil)
		if err == nil && head.Branch != "main" {
			err = errors.New("the branch is " + head.Branch)
		}
		ended <- err
	}()
	return ended
}

// checkClone checks that /srv has the whole clone and nothing incomplete.
func (b *box) checkClone() {
	b.t.Helper()
	if got := b.exec("ls -A /srv; git -C /srv/shop status --porcelain; git -C /srv/shop fsck; ls /srv/shop | wc -l"); got != "begun\ngo\nhook\norigin\nshop\n100" {
		b.t.Errorf("after the clone: %s", got)
	}
}

func TestCloneGoesOnAfterSleep(t *testing.T) {
	b := commonNode(t).newBox(t)
	ended := b.clone(b.newOrigin())
	b.exec("cat /srv/begun")
	if _, err := b.node.API.ForceSleep(testkit.Context(t), b.id); err != nil || b.state() != types.StateAsleep {
		t.Fatalf("%v, in state %s", err, b.state())
	}
	b.exec("echo >/srv/go")
	b.must(testkit.Receive(t, "the clone", ended))
	b.checkClone()
}

func TestCloneThatWasCutOffIsRepeated(t *testing.T) {
	n := commonNode(t)
	for name, end := range map[string]func(b *box) (left bool){
		"stop": func(b *box) bool { // a clone that ends before its sandbox is removed
			_, err := n.API.ForceStop(testkit.Context(t), b.id)
			b.must(err)
			if state := b.state(); state != types.StateStopped {
				t.Errorf("the clone left the sandbox %s", state)
			}
			return false
		},
		"kill": func(b *box) bool { b.killFirst(n); return true },
	} {
		t.Run(name, func(t *testing.T) {
			b := n.newBox(t)
			url := b.newOrigin()
			ended := b.clone(url)
			b.exec("cat /srv/begun")
			left := end(b)
			// The stop ends git, one of git's own processes, or the guest first.
			if err := testkit.Receive(t, "the clone", ended); !problem.Has(err, problem.GuestLost) && !problem.Has(err, problem.GitNetworkFailed) &&
				!(problem.Has(err, problem.GitFailed) && strings.Contains(err.Error(), "git was ended by SIG")) {
				t.Errorf("got %v", err)
			}
			if names := b.exec("ls -A /srv"); strings.HasPrefix(names, ".doze-clone-") != left || strings.Contains(names, "shop") {
				t.Errorf("left %s", names)
			}
			b.exec("git config --global --unset uploadpack.packObjectsHook")
			b.must(testkit.Receive(t, "the clone", b.clone(url)))
			b.checkClone()
		})
	}
}

func TestCloneFromADeniedHost(t *testing.T) {
	b := commonNode(t).newBox(t)
	_, err := b.node.API.SetRules(testkit.Context(t), b.id, client.RulesUpdate{Default: "deny", Rules: json.RawMessage(`[{"name":"code","hosts":["code.example.com"],"action":"deny"}]`)})
	b.must(err)
	for host, rule := range map[string]string{"code.example.com": "code", "other.example.com": ""} {
		_, err := b.node.API.CloneRepository(testkit.Context(t), b.id, types.GitCloneRequest{URL: "https://" + host + "/shop.git"}, nil)
		p, ok := errors.AsType[*problem.Problem](err)
		if !ok || p.Code != problem.EgressDenied || !strings.Contains(p.Detail, host) || rule != "" && !strings.HasSuffix(p.Rule, rule) {
			t.Errorf("%s: %+v", host, err)
		}
	}
}

func TestCloneWithoutGitReportsWhatToInstall(t *testing.T) {
	b := commonNode(t).newBox(t, func(req *types.CreateSandboxRequest) { req.Image = "localhost/doze/test-musl:latest" })
	_, err := b.node.API.CloneRepository(testkit.Context(t), b.id, types.GitCloneRequest{URL: "https://code.example.com/shop.git", TargetDir: "/srv/shop"}, nil)
	if p, ok := errors.AsType[*problem.Problem](err); !ok || p.Code != problem.GitNotInstalled || p.Status != 501 || !strings.Contains(p.Detail, "install the package git") {
		t.Errorf("got %+v", err)
	}
}
