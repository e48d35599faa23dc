package sandbox_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"math/big"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/guesttest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// mustBeAttached fails the test unless the container that runs is the one that is
// attached.
func mustBeAttached(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
	t.Helper()
	c, err := n.Engine.Inspect(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if got := n.Uplink.Attached(id); got != c.PID || got == 0 {
		t.Errorf("the container with pid %d is attached, want %d", got, c.PID)
	}
}

func mustBeDetached(t *testing.T, n *sandboxtest.Node, id sandbox.ID) {
	t.Helper()
	if got := n.Uplink.Attached(id); got != 0 {
		t.Errorf("the container with pid %d is still attached", got)
	}
}

func TestEachRunOfTheContainerIsAttached(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	sb := create(t, m, "app")
	mustBeAttached(t, n, sb.ID)
	before := n.Uplink.Attaches()
	mustSleep(t, m, sb.ID)
	mustBeAttached(t, n, sb.ID)
	acquire(t, m, sb.ID).Release()
	if n.Uplink.Attaches() != before {
		t.Error("a warm wake attached it again")
	}
	mustStop(t, m, sb.ID)
	mustBeDetached(t, n, sb.ID)
	if !n.Uplink.Knows(sb.ID) {
		t.Error("a stopped sandbox is forgotten")
	}
	acquire(t, m, sb.ID).Release()
	mustBeAttached(t, n, sb.ID)
	if err := m.Destroy(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	mustBeDetached(t, n, sb.ID)
	if n.Uplink.Knows(sb.ID) {
		t.Error("a destroyed sandbox is not forgotten")
	}
}

func TestCrashedContainerIsDetached(t *testing.T) {
	for name, asleep := range map[string]bool{"running": false, "asleep": true} {
		t.Run(name, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			sb := create(t, n.Manager, "app")
			if asleep {
				mustSleep(t, n.Manager, sb.ID)
			}
			events := subscribe(t, n.Manager, sb.ID)
			n.Engine.Kill(t, sb.ID)
			nextEvent(t, events, sandbox.EventStopped)
			mustBeDetached(t, n, sb.ID)
			acquire(t, n.Manager, sb.ID).Release()
			mustBeAttached(t, n, sb.ID)
		})
	}
}

func TestSandboxThatCannotBeAttachedDoesNotStart(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustStop(t, n.Manager, sb.ID)
	n.Uplink.Fail("attach", syscall.EMFILE)
	var we *sandbox.WakeError
	if _, err := n.Manager.Acquire(t.Context(), sb.ID, sandbox.CauseExec); !errors.As(err, &we) || !errors.Is(err, syscall.EMFILE) {
		t.Errorf("acquire: %v", err)
	}
	mustHaveCondition(t, n, sb.ID, sandbox.ConditionWakeFailed, "too many open files")
	c, err := n.Engine.Inspect(t.Context(), sb.ID)
	if err != nil || c.State == sandbox.ContainerRunning {
		t.Errorf("its container is %s, error %v", c.State, err)
	}
	if _, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "other"}); !errors.Is(err, syscall.EMFILE) {
		t.Errorf("create: %v", err)
	}
	if n.Engine.Count() != 1 {
		t.Errorf("%d containers are left, want one", n.Engine.Count())
	}
	n.Uplink.Fail("attach", nil)
	acquire(t, n.Manager, sb.ID).Release()
	mustBeWell(t, n, sb.ID)
	mustBeAttached(t, n, sb.ID)
}

// The first action of a declared process is to connect to its database.
func TestSandboxIsAttachedBeforeItsProcessesStart(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	sb := create(t, m, "app")
	spec := guest.ProcessSpec{Command: guest.Command{Argv: []string{"sleep", "600"}}, Name: "web", Restart: guest.RestartOnWake}
	if _, err := m.StartProcess(t.Context(), sb.ID, spec); err != nil {
		t.Fatal(err)
	}
	mustStop(t, m, sb.ID)
	release := n.Uplink.Block("attach")
	events := subscribe(t, m, sb.ID)
	woken := make(chan error, 1)
	go func() {
		_, err := m.Wake(t.Context(), sb.ID)
		woken <- err
	}()
	n.Uplink.AwaitBlocked(t, "attach")
	select {
	case ev := <-events:
		t.Errorf("before it was attached: %+v", ev)
	default:
	}
	release()
	if err := <-woken; err != nil {
		t.Fatal(err)
	}
	nextEvent(t, events, sandbox.EventProcessStart)
}

func TestDestroyEndsAnAttachment(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustStop(t, n.Manager, sb.ID)
	release := n.Uplink.Block("attach")
	defer release()
	woken := make(chan error, 1)
	go func() {
		_, err := n.Manager.Wake(t.Context(), sb.ID)
		woken <- err
	}()
	n.Uplink.AwaitBlocked(t, "attach")
	if err := n.Manager.Destroy(t.Context(), sb.ID); err != nil {
		t.Errorf("destroy: %v", err)
	}
	if err := <-woken; !errors.Is(err, sandbox.ErrDestroyed) {
		t.Errorf("wake: %v", err)
	}
	if n.Uplink.Attached(sb.ID) != 0 || n.Uplink.Knows(sb.ID) {
		t.Error("something is left of it")
	}
}

func TestFailedForgetIsRepeatedAtTheNextStart(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	gone, stopped := create(t, n.Manager, "gone"), create(t, n.Manager, "stopped")
	mustStop(t, n.Manager, stopped.ID)
	n.Uplink.Fail("forget", errors.New("the disk is full"))
	if err := n.Manager.Destroy(t.Context(), gone.ID); err != nil {
		t.Fatal(err)
	}
	n.Uplink.Fail("forget", nil)
	if !n.Uplink.Knows(gone.ID) {
		t.Fatal("it is forgotten already")
	}
	n.Crash(t, func() {})
	if n.Uplink.Knows(gone.ID) {
		t.Error("it is still not forgotten")
	}
	if !n.Uplink.Knows(stopped.ID) {
		t.Error("an existing sandbox is forgotten")
	}
}

func TestAdoptedSandboxesAreAttachedAgain(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	running, asleep, stopped := create(t, n.Manager, "running"), create(t, n.Manager, "asleep"), create(t, n.Manager, "stopped")
	half := create(t, n.Manager, "half-destroyed")
	mustSleep(t, n.Manager, asleep.ID)
	mustStop(t, n.Manager, stopped.ID)
	n.Engine.Fail("remove", syscall.EIO)
	if err := n.Manager.Destroy(t.Context(), half.ID); !errors.Is(err, syscall.EIO) {
		t.Fatalf("destroy: %v", err)
	}
	n.Engine.Fail("remove", nil)
	if !n.Uplink.Knows(half.ID) {
		t.Error("a half-destroyed one is forgotten already")
	}
	n.Crash(t, func() {})
	mustBeAttached(t, n, running.ID)
	mustBeAttached(t, n, asleep.ID)
	mustBeDetached(t, n, stopped.ID)
	if n.Uplink.Knows(half.ID) {
		t.Error("a half-destroyed sandbox is not forgotten")
	}
	if got := stateOf(t, n.Manager, asleep.ID); got != sandbox.StateAsleep {
		t.Errorf("to be attached it was brought to %s", got)
	}
}

func TestFailedAttachmentOfAnAdoptedSandboxIsRetried(t *testing.T) {
	t.Parallel()
	n := sandboxtest.Open(t, nil)
	running, asleep, stopped := create(t, n.Manager, "running"), create(t, n.Manager, "asleep"), create(t, n.Manager, "stopped")
	mustSleep(t, n.Manager, asleep.ID)
	n.Crash(t, func() { n.Uplink.Fail("attach", syscall.EMFILE) })
	m := n.Manager
	for id, want := range map[sandbox.ID]sandbox.State{running.ID: sandbox.StateRunning, asleep.ID: sandbox.StateAsleep} {
		if got := mustHaveCondition(t, n, id, sandbox.ConditionNetworkLost, "no network"); got.State != want {
			t.Errorf("%s is %s, want %s", got.Name, got.State, want)
		}
		if !m.Armed(id) {
			t.Error("it is not tried again")
		}
		m.RunCheck(id)
		mustHaveCondition(t, n, id, sandbox.ConditionNetworkLost, "too many open files")
	}
	mustStop(t, m, stopped.ID)
	n.Uplink.Fail("attach", nil)
	for _, id := range []sandbox.ID{running.ID, asleep.ID} {
		m.RunCheck(id)
		mustBeWell(t, n, id)
		mustBeAttached(t, n, id)
	}
	if got := stateOf(t, m, asleep.ID); got != sandbox.StateAsleep {
		t.Errorf("to be attached it was brought to %s", got)
	}
	before := n.Uplink.Attaches()
	m.RunCheck(running.ID)
	m.RunCheck(stopped.ID)
	if n.Uplink.Attaches() != before {
		t.Error("a sandbox that is attached, or does not run, was attached again")
	}
}

func TestUnusableSandboxIsDetached(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	n.Engine.HandleGuest(sandboxtest.UnknownGuest)
	_, _, err := n.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: owner, Name: "stranger"})
	var version *guest.VersionError
	if !errors.As(err, &version) {
		t.Fatalf("create: %v", err)
	}
	strange := becomeUnknown(n)
	sb := create(t, n.Manager, "app")
	n.Crash(t, func() { strange.Store(true) })
	testkit.Eventually(t, "it is given up", func() bool { return stateOf(t, n.Manager, sb.ID) == sandbox.StateStopped })
	testkit.Eventually(t, "it is detached", func() bool { return n.Uplink.Attached(sb.ID) == 0 })
}

func TestRouseWakesSleepingSandboxesAndStartsNone(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	sb := create(t, m, "app")
	rouse := func() (*sandbox.Lease, error) { return m.Rouse(t.Context(), sb.ID, sandbox.CauseEgress) }
	lease, err := rouse()
	if err != nil || lease.Wake().Kind != sandbox.WakeNone {
		t.Fatalf("running: %v", err)
	}
	lease.Release()
	mustSleep(t, m, sb.ID)
	events := subscribe(t, m, sb.ID)
	if lease, err = rouse(); err != nil || lease.Wake().Kind != sandbox.WakeWarm {
		t.Fatalf("asleep: %v", err)
	}
	if ev := nextEvent(t, events, sandbox.EventWoke); ev.Cause != sandbox.CauseEgress {
		t.Errorf("woken by %q", ev.Cause)
	}
	lease.Release()
	mustStop(t, m, sb.ID)
	if _, err := rouse(); !errors.Is(err, sandbox.ErrNotRunning) {
		t.Errorf("stopped: %v", err)
	}
	if got := stateOf(t, m, sb.ID); got != sandbox.StateStopped {
		t.Errorf("it was brought to %s", got)
	}
	mustBeWell(t, n, sb.ID)
	if _, err := m.Rouse(t.Context(), "unknown00000", sandbox.CauseEgress); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("unknown: %v", err)
	}
}

func TestRouseOfASandboxThatDiedAsleepStartsNothing(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustSleep(t, n.Manager, sb.ID)
	n.Crash(t, func() {}) // adopted asleep, its guest has no watcher
	n.Engine.Kill(t, sb.ID)
	n.Freezer.FailOnce("freeze", syscall.EIO)
	if _, err := n.Manager.Rouse(t.Context(), sb.ID, sandbox.CauseEgress); !errors.Is(err, sandbox.ErrNotRunning) {
		t.Errorf("rouse: %v", err)
	}
	if got := stateOf(t, n.Manager, sb.ID); got != sandbox.StateStopped {
		t.Errorf("it is %s", got)
	}
	mustBeDetached(t, n, sb.ID)
	acquire(t, n.Manager, sb.ID).Release()
}

// Both wait for one wake.
func TestAcquireStartsTheSandboxForARouse(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	sb := create(t, m, "app")
	mustSleep(t, m, sb.ID)
	release := n.Engine.Block("stop")
	stopped := make(chan error, 1)
	go func() {
		_, err := m.Stop(t.Context(), sb.ID)
		stopped <- err
	}()
	n.Engine.AwaitBlocked(t, "stop") // has the transition lock; all others wait
	woken := make(chan error, 2)
	wait := func(lease *sandbox.Lease, err error) {
		if err == nil {
			lease.Release()
		}
		woken <- err
	}
	go func() { wait(m.Rouse(t.Context(), sb.ID, sandbox.CauseEgress)) }()
	testkit.Eventually(t, "one waits", func() bool { return m.Info(t.Context()).Waiters == 1 })
	go func() { wait(m.Acquire(t.Context(), sb.ID, sandbox.CauseExec)) }()
	testkit.Eventually(t, "both wait", func() bool { return m.Info(t.Context()).Waiters == 2 })
	release()
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := <-woken; err != nil {
			t.Error(err)
		}
	}
}

// An Acquire joins just after the wake has decided against a start.
func TestAcquireTooLateForAWarmWakeStartsAnother(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	m := n.Manager
	sb := create(t, m, "app")
	mustStop(t, m, sb.ID)
	decided := m.WarmWake(sb.ID)
	acquired := make(chan error, 1)
	go func() {
		lease, err := m.Acquire(t.Context(), sb.ID, sandbox.CauseExec)
		if err == nil {
			lease.Release()
		}
		acquired <- err
	}()
	testkit.Eventually(t, "a waiter", func() bool { return m.Info(t.Context()).Waiters == 1 })
	decided()
	if err := <-acquired; err != nil {
		t.Errorf("acquire: %v", err)
	}
}

func TestEnvironmentOfTheUplinkHasTheLowestPrecedence(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	n.Uplink.SetEnvironment(map[string]string{"DOZE_ONE": "uplink", "DOZE_TWO": "uplink"})
	lease := acquire(t, n.Manager, sb.ID)
	defer lease.Release()
	read := func() string {
		t.Helper()
		out, err := guesttest.Run(t.Context(), lease.Guest(), guest.ExecRequest{Command: guest.Command{Argv: []string{"sh", "-c", "echo $DOZE_ONE $DOZE_TWO"}, Env: map[string]string{"DOZE_TWO": "command"}}})
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(out.Stdout))
	}
	if got := read(); got != "uplink command" {
		t.Errorf("a command has %q", got)
	}
	n.Uplink.SetEnvironment(map[string]string{"DOZE_ONE": "later"})
	if got := read(); got != "later command" {
		t.Errorf("a later command has %q", got)
	}
	spec := guest.ProcessSpec{Command: guest.Command{Argv: []string{"sh", "-c", `test "$DOZE_ONE" = later`}}, Name: "web", Restart: guest.RestartOnWake}
	events := subscribe(t, n.Manager, sb.ID)
	if _, err := n.Manager.StartProcess(t.Context(), sb.ID, spec); err != nil {
		t.Fatal(err)
	}
	if ev := nextEvent(t, events, sandbox.EventProcessExited); *ev.Process.ExitCode != 0 {
		t.Error("a process does not have it")
	}
	if got, _ := n.Manager.ByID(sb.ID); len(got.Declared) != 1 || got.Declared[0].Env != nil || got.Declared[0].Defaults != nil {
		t.Errorf("it is kept with what was declared: %+v", got.Declared)
	}
}

// A caller who leaves a Rouse leaves nothing behind.
func TestRouseEndsWithItsContext(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	mustSleep(t, n.Manager, sb.ID)
	release := n.Engine.Block("stop")
	go n.Manager.Stop(t.Context(), sb.ID)
	n.Engine.AwaitBlocked(t, "stop")
	ctx, cancel := context.WithCancel(t.Context())
	roused := make(chan error, 1)
	go func() {
		_, err := n.Manager.Rouse(ctx, sb.ID, sandbox.CauseEgress)
		roused <- err
	}()
	testkit.Eventually(t, "it waits", func() bool { return n.Manager.Info(t.Context()).Waiters == 1 })
	cancel()
	if err := <-roused; !errors.Is(err, context.Canceled) {
		t.Errorf("rouse: %v", err)
	}
	release()
	testkit.Eventually(t, "it is stopped", func() bool { return stateOf(t, n.Manager, sb.ID) == sandbox.StateStopped })
}

// newCA makes a CA's PEM.
func newCA(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// trusting is a guest that records the CAs that it gets, and reports their digest.
type trusting struct {
	*hostileGuest
	fail atomic.Pointer[guest.Error]

	mu       sync.Mutex
	digest   string
	received []guest.Trust
	roots    bool // it has some
}

func newTrusting() *trusting {
	return &trusting{hostileGuest: hostile(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})}
}

func (g *trusting) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch r.URL.Path {
	case guest.RouteHello:
		json.NewEncoder(w).Encode(guest.Hello{Protocol: guest.ProtocolVersion, Version: "test", PID: 1, Trust: g.digest})
	case guest.RouteTrust:
		var t guest.Trust
		json.NewDecoder(r.Body).Decode(&t)
		g.received, g.digest, g.roots = append(g.received, t), guest.TrustDigest([]byte(t.CA)), g.roots || t.Roots != ""
		if e := g.fail.Load(); e != nil {
			w.WriteHeader(http.StatusInsufficientStorage)
			json.NewEncoder(w).Encode(e)
			return
		}
		json.NewEncoder(w).Encode(guest.TrustResult{NeedsRoots: !g.roots})
	default:
		g.mu.Unlock()
		defer g.mu.Lock()
		g.hostileGuest.ServeHTTP(w, r)
	}
}

// newTrusts returns the requests since the last call.
func (g *trusting) newTrusts() []guest.Trust {
	g.mu.Lock()
	defer g.mu.Unlock()
	given := g.received
	g.received = nil
	return given
}

// restart is what the end of a container does to its guest.
func (g *trusting) restart() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.digest = ""
}

func TestEachRunOfTheGuestTrustsTheUplink(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	g := newTrusting()
	n.Engine.HandleGuest(g)
	first, second := newCA(t), newCA(t)
	want := func(when string, want ...guest.Trust) {
		t.Helper()
		if got := g.newTrusts(); !slices.Equal(got, want) {
			t.Errorf("%s it got %+v, want %+v", when, got, want)
		}
	}
	early := create(t, n.Manager, "early")
	want("early")

	n.Roots = func() ([]byte, error) { return []byte("the public ones"), nil }
	n.Uplink.SetTrust(first)
	n.Crash(t, func() {}) // adopted by a node that has CAs
	want("when it was adopted", guest.Trust{CA: string(first)}, guest.Trust{CA: string(first), Roots: "the public ones"})
	n.Crash(t, func() {})
	want("when it was adopted again")
	if err := n.Manager.Destroy(t.Context(), early.ID); err != nil {
		t.Fatal(err)
	}
	g.restart()
	sb := create(t, n.Manager, "app")
	want("when it was created", guest.Trust{CA: string(first)})
	mustSleep(t, n.Manager, sb.ID)
	acquire(t, n.Manager, sb.ID).Release()
	want("by a warm wake")
	mustStop(t, n.Manager, sb.ID)
	g.restart()
	acquire(t, n.Manager, sb.ID).Release()
	want("by a cold wake", guest.Trust{CA: string(first)})

	n.Uplink.SetTrust(second)
	n.Manager.RunCheck(sb.ID)
	want("when the CA was renewed", guest.Trust{CA: string(second)})
	n.Manager.RunCheck(sb.ID)
	want("by another look")
	mustSleep(t, n.Manager, sb.ID)
	n.Uplink.SetTrust(first)
	n.Crash(t, func() {})
	want("while it sleeps")
	acquire(t, n.Manager, sb.ID).Release()
	want("when it was adopted asleep and woke", guest.Trust{CA: string(first)})
}

// A full disk only prevents what needs the CA.
func TestSandboxThatCannotTrustTheUplinkRunsWithACondition(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	g := newTrusting()
	g.fail.Store(&guest.Error{Code: guest.CodeNoSpace, Message: "the disk is full"})
	n.Engine.HandleGuest(g)
	n.Uplink.SetTrust(newCA(t))
	sb := create(t, n.Manager, "app")
	if got := mustHaveCondition(t, n, sb.ID, sandbox.ConditionTrustFailed, "the disk is full"); got.State != sandbox.StateRunning {
		t.Errorf("it is %s", got.State)
	}
	g.newTrusts()
	n.Manager.RunCheck(sb.ID)
	if got := g.newTrusts(); len(got) > 0 {
		t.Error("the same run of the guest got the CA twice")
	}
	g.restart()
	n.Crash(t, func() {})
	mustHaveCondition(t, n, sb.ID, sandbox.ConditionTrustFailed, "the disk is full")
	g.fail.Store(nil)
	mustStop(t, n.Manager, sb.ID)
	g.restart()
	acquire(t, n.Manager, sb.ID).Release()
	mustBeWell(t, n, sb.ID)
	if got := g.newTrusts(); len(got) == 0 {
		t.Error("the next run got no CA")
	}
}

func TestHostWithoutRootsIsACondition(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	n.Engine.HandleGuest(newTrusting())
	n.Uplink.SetTrust(newCA(t))
	n.Roots = func() ([]byte, error) { return nil, errors.New("install ca-certificates") }
	n.Crash(t, func() {})
	mustHaveCondition(t, n, create(t, n.Manager, "app").ID, sandbox.ConditionTrustFailed, "install ca-certificates")
}
