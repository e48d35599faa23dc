package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/uplinktest"
	"github.com/doze-run/doze/testkit"
)

// process is a container of the conformance suite.
type process struct {
	d   *devices
	pid int
}

func (p *process) PID() int { return p.pid }

func (p *process) Stop() {
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	p.d.ended[p.pid] = true
	for _, n := range p.d.networks {
		if n.pid == p.pid {
			n.Close()
		}
	}
}

func TestEgressIsAnUplink(t *testing.T) {
	var pids atomic.Int64
	uplinktest.Run(t, func(t *testing.T) uplinktest.System {
		r := newRig(t)
		d := r.devices
		d.ended = map[int]bool{}
		return uplinktest.System{
			Uplink: r.Egress,
			Start: func(_ testing.TB, id sandbox.ID) uplinktest.Box {
				r.sandboxes.put(sandbox.Sandbox{ID: id, Owner: owner})
				return &process{d, int(pids.Add(1))}
			},
			Attached: func(id sandbox.ID, pid int) bool {
				n := d.network(id)
				if n == nil || n.pid != pid || !n.Attached() {
					return false
				}
				conn, err := n.DialContext(testkit.Context(t), "tcp", "198.18.0.1:53")
				if err != nil {
					return false
				}
				return conn.Close() == nil
			},
		}
	})
}

func TestNothingIsAttachedWhileEgressCloses(t *testing.T) {
	r := newRig(t)
	sb := sandbox.Sandbox{ID: "k3f9x2m7q1az", Owner: owner}
	r.sandboxes.put(sb)
	d := r.devices
	d.made = func() { r.close() } // between the device and its stack
	if err := r.Attach(testkit.Context(t), sb, 1); !errors.Is(err, sandbox.ErrClosed) {
		t.Errorf("got %v", err)
	}
	if d.network(sb.ID).Attached() {
		t.Error("the device is still attached")
	}
	if err := r.Attach(testkit.Context(t), sandbox.Sandbox{ID: "other0000000", Owner: owner}, 1); !errors.Is(err, sandbox.ErrClosed) {
		t.Errorf("after it was closed: %v", err)
	}
}

func TestForgottenSandboxesLeaveNothing(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.rules(rule.Rule{Name: "look", Hosts: []string{"a.web.test"}, Methods: []string{"GET"}, Action: rule.Allow})
	b.want(b.get("https://a.web.test/"), 200, "this is")
	b.entry("a.web.test", nil)
	r.Detach(b.sb.ID)
	if b.Attached() {
		t.Error("the device is still attached")
	}
	r.names.flush()
	if got := r.documents.named(t, string(b.sb.ID)); len(got) != 2 {
		t.Errorf("stored are %v", got)
	}
	b.sb.State = sandbox.StateDestroyed // its record remains for a moment
	r.sandboxes.put(b.sb)
	r.Forget(b.sb.ID)
	for _, when := range []string{"when it is being destroyed", "when it is gone"} {
		if _, err := r.Explain(testkit.Context(t), b.sb.ID, "GET", "https://a.web.test/", nil); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("explain %s: %v", when, err)
		}
		if _, _, err := r.SetRules(testkit.Context(t), owner, b.sb.ID, ruleset.Update{}); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("rules %s: %v", when, err)
		}
		r.sandboxes.remove(b.sb.ID)
	}
	r.names.flush()
	if got := r.documents.named(t, string(b.sb.ID)); len(got) != 0 {
		t.Errorf("stored are %v", got)
	}
	if len(r.attachments) != 0 || len(r.layers) != 1 || len(r.Flows.Entries(string(b.sb.ID), audit.Filter{})) != 0 || len(r.Environment(b.sb.ID)) != 0 {
		t.Error("something of it is in memory")
	}
}

func TestOldSealingKeysCanBeRemovedAfterOneStart(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.secret("api", token, "a.web.test")
	b.rules(offering("a.web.test"))
	trust, environment := string(r.Trust()), r.Environment(b.sb.ID)
	file := filepath.Join(r.config.Folder, "seal.key")
	old, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	const newer = "bmV3ZXIgbmV3ZXIgbmV3ZXIgbmV3ZXIgbmV3ZXIgb2s=\n"
	for _, keys := range []string{newer + string(old), newer} {
		if err := os.WriteFile(file, []byte(keys), 0o600); err != nil {
			t.Fatal(err)
		}
		r.reopen()
	}
	b.attach()
	if string(r.Trust()) != trust {
		t.Error("the node has another authority")
	}
	if now := r.Environment(b.sb.ID); !maps.Equal(now, environment) {
		t.Errorf("placeholders were %v, are %v", environment, now)
	}
	if value, err := r.Secrets.Use(owner, "api", "a.web.test"); err != nil || string(value) != token {
		t.Errorf("the secret is %q, %v", value, err)
	}
}

func TestSandboxesThatWereNotForgottenAreKnownAfterARestart(t *testing.T) {
	r := newRig(t)
	ruled, named, other := r.box("ruled0000000"), r.box("named0000000"), r.box("k3f9x2m7q1az")
	ruled.rules(rule.Rule{Name: "no", Hosts: []string{"a.web.test"}, Action: rule.Deny})
	for _, b := range []*box{named, other} {
		b.want(b.get("https://a.web.test/"), 200, "this is")
	}
	r.names.flush()
	r.documents.failWith(errors.New("the disk is full"))
	for _, b := range []*box{ruled, named} {
		r.Detach(b.sb.ID)
		if b.Attached() {
			t.Error("the device is still attached")
		}
		r.sandboxes.remove(b.sb.ID)
		r.Forget(b.sb.ID)
	}
	r.documents.failWith(nil)
	r.reopen()
	kept := r.Known()
	slices.Sort(kept)
	if want := []sandbox.ID{other.sb.ID, named.sb.ID, ruled.sb.ID}; !slices.Equal(kept, want) {
		t.Fatalf("kept are %v, want %v", kept, want)
	}
	r.Forget(ruled.sb.ID)
	r.Forget(named.sb.ID)
	if kept := r.Known(); !slices.Equal(kept, []sandbox.ID{other.sb.ID}) {
		t.Errorf("kept are %v", kept)
	}
	if left := append(r.documents.named(t, "ruled"), r.documents.named(t, "named")...); len(left) != 0 {
		t.Errorf("stored are %v", left)
	}
}

func TestStateSurvivesARestart(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.push("bearer", bearer(1))
	b.secret("api", token, "a.web.test")
	b.rules(through("a.web.test", "bearer", "api"), offering("b.web.test"))
	if _, _, err := r.SetRules(testkit.Context(t), owner, "", ruleset.Update{Rules: []rule.Rule{{Name: "never", Hosts: []string{"never.web.test"}, Action: rule.Deny, Reason: "kept"}}}); err != nil {
		t.Fatal(err)
	}
	address, err := b.Resolver().LookupNetIP(testkit.Context(t), "ip4", "a.web.test.")
	if err != nil {
		t.Fatal(err)
	}
	trust, environment := string(r.Trust()), b.Environment(b.sb.ID)["API_TOKEN"]

	r.reopen()
	b.attach()
	if string(r.Trust()) != trust {
		t.Error("sandboxes have to trust another CA")
	}
	if got := b.Environment(b.sb.ID)["API_TOKEN"]; got == "" || got != environment {
		t.Errorf("the placeholder was %q, is %q", environment, got)
	}
	known := b.Client.Transport.(*http.Transport).Clone()
	defer known.CloseIdleConnections()
	known.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) { // without another lookup
		return b.DialContext(ctx, network, netip.AddrPortFrom(address[0].Unmap(), 443).String())
	}
	if res, err := (&http.Client{Transport: known, Timeout: testkit.Patience}).Get("https://a.web.test/"); err != nil || res.StatusCode != 200 {
		t.Errorf("%v does not stand for the name: %v", address, err)
	} else {
		res.Body.Close()
	}
	b.want(b.get("https://a.web.test/"), 200, "this is")
	if got := b.servers.last(t).Header.Get("Authorization"); got != "Bearer "+token {
		t.Errorf("the server got %q", got)
	}
	if d := r.find(b.sb.ID).Table().Name("never.web.test"); d.Verdict != rule.VerdictDeny || d.Reason != "kept" {
		t.Errorf("got %+v", d)
	}
	if got := r.sets.Get(ruleset.Scope{Sandbox: b.sb.ID}); got.Revision != 1 || len(got.Rules) != 2 {
		t.Errorf("got %+v", got)
	}
}

func TestDefaultsWithoutRulesSurviveARestart(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	deny := ruleset.Update{Default: rule.DenyAll}
	check := func(want string) {
		t.Helper()
		e, err := r.Explain(testkit.Context(t), b.sb.ID, "GET", "https://a.web.test/", nil)
		if got := string(e.Verdict) + " " + e.Rule + ": " + e.Reason; err != nil || !strings.HasPrefix(got, want) {
			t.Errorf("got %s, %v, want %s", got, err, want)
		}
	}
	for _, step := range []struct {
		id   sandbox.ID
		want string
	}{{"", "deny default: no rule of the owner or the sandbox"}, {b.sb.ID, "deny default: no rule of the sandbox"}} {
		check("allow default")
		if _, _, err := r.SetRules(testkit.Context(t), owner, step.id, deny); err != nil {
			t.Fatal(err)
		}
		check(step.want)
		r.reopen()
		check(step.want)
		b.attach()
		check(step.want)
		if _, err := b.Resolver().LookupNetIP(testkit.Context(t), "ip4", "a.web.test."); err == nil {
			t.Error("the name has an address")
		}
		if _, _, err := r.SetRules(testkit.Context(t), owner, step.id, ruleset.Update{Default: rule.Inherit}); err != nil {
			t.Fatal(err)
		}
	}
	b.want(b.get("https://a.web.test/"), 200, "this is")
}

// A caller that gives up while a module compiles must not leave its policy unready.
func TestCanceledAttachLeavesNoPolicyUnready(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	many := through("a.web.test", "note0", "")
	for n := range rule.MaxChain { // whether a single one notices the canceled context is chance
		name := fmt.Sprintf("note%d", n)
		b.push(name, noting(name))
		if n > 0 {
			many.Policies = append(many.Policies, rule.Use{Policy: name})
		}
	}
	b.rules(many)
	r.reopen()
	ctx, cancel := contextUntil(nil)
	cancel()
	if err := r.Attach(ctx, b.sb, 1); err == nil {
		t.Error("it was attached")
	}
	b.attach()
	b.want(b.get("https://a.web.test/"), 200, "this is")
}

func TestMissingModulesDenyUntilTheNextPush(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.push("one", noting("one"))
	b.push("two", noting("two"))
	one, two := through("one.web.test", "one", ""), through("two.web.test", "two", "")
	two.Name = "two"
	b.rules(one, two)
	r.close()
	for _, name := range []string{"policies", "compiled"} {
		if err := os.RemoveAll(r.config.Folder + "/" + name); err != nil {
			t.Fatal(err)
		}
	}
	r.open()
	b.attach()
	b.want(b.get("https://one.web.test/"), 403, "push it again")
	b.want(b.get("https://two.web.test/"), 403, "push it again")
	b.push("one", noting("one"))
	b.want(b.get("https://one.web.test/"), 200, "this is")
	b.want(b.get("https://two.web.test/"), 403, "push it again")
	b.push("two", noting("two"))
	b.want(b.get("https://two.web.test/"), 200, "this is")
}

func TestUpstreamBytesWakeTheSandboxAndItsOwnKeepItAwake(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	b.want(b.get("https://a.web.test/"), 200, "this is")
	r.sandboxes.mu.Lock()
	if r.sandboxes.touched[b.sb.ID] == 0 {
		t.Error("the bytes that it sends do not keep it awake")
	}
	r.sandboxes.roused = func(_ context.Context, id sandbox.ID) error { return errors.New("it is stopped") }
	r.sandboxes.mu.Unlock()
	b.Client.CloseIdleConnections()
	if a, err := b.try(newRequest(t, "GET", "http://a.plain.test/", nil)); err == nil {
		t.Errorf("got %+v", a)
	}
}

// A program that waits for bytes from a dead connection must wake and see the end.
func TestEndOfAConnectionWakesTheSandbox(t *testing.T) {
	for name, end := range map[string]func(net.Conn) error{
		"its server closes it": func(c net.Conn) error { return c.Close() },
		"its server resets it": func(c net.Conn) error { return errors.Join(c.(*net.TCPConn).SetLinger(0), c.Close()) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			b := r.box("k3f9x2m7q1az")
			sleeps, woken := make(chan struct{}), make(chan struct{}, 1)
			r.servers.mu.Lock()
			r.servers.speak = func(conn net.Conn) {
				<-sleeps
				if err := end(conn); err != nil {
					t.Error(err)
				}
			}
			r.servers.mu.Unlock()
			conn, err := b.DialContext(testkit.Context(t), "tcp", "db.tcp.test:5432")
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			r.sandboxes.mu.Lock()
			r.sandboxes.roused = func(context.Context, sandbox.ID) error {
				select {
				case woken <- struct{}{}:
				default:
				}
				return nil
			}
			r.sandboxes.mu.Unlock()
			close(sleeps)
			select {
			case <-woken:
			case <-testkit.Context(t).Done():
				t.Error("it sleeps on")
			}
		})
	}
}

// Detaching the network must not wake the sandbox: the container that used it is ending.
func TestDetachWakesNoSandbox(t *testing.T) {
	r := newRig(t)
	b := r.box("k3f9x2m7q1az")
	conn, err := b.DialContext(testkit.Context(t), "tcp", "db.tcp.test:5432")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil { // the server echoes it
		t.Fatal(err)
	}
	r.sandboxes.mu.Lock()
	r.sandboxes.roused = func(context.Context, sandbox.ID) error {
		t.Error("it is woken")
		return nil
	}
	r.sandboxes.mu.Unlock()
	r.Detach(b.sb.ID)
}

func TestNodeKeysOutliveTheNode(t *testing.T) {
	r := newRig(t)
	key := func(name string) string {
		t.Helper()
		key, err := r.NodeKey(t.Context(), name)
		if err != nil || len(key) != 32 {
			t.Fatalf("%d bytes, %v", len(key), err)
		}
		return string(key)
	}
	first, other := key("first"), key("other")
	r.reopen()
	if key("first") != first || key("other") != other || first == other {
		t.Error("the keys differ after a restart, or do not differ by name")
	}
}
