package sandbox_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// furnish creates a sandbox that has everything a sandbox can have, most of it changed
// since its creation.
func furnish(t *testing.T, n *sandboxtest.Node) sandbox.Sandbox {
	t.Helper()
	m := n.Manager
	ttl := sandbox.Duration(time.Hour)
	made, _, err := m.Create(t.Context(), sandbox.CreateRequest{
		Owner: owner, Name: "app", Image: "other", Size: "standard", TTL: &ttl,
		Env: map[string]string{"A": "b"}, Labels: map[string]string{"team": "x"},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, port := range []sandbox.Port{
		{Port: 3000},
		{Port: 4000},
		{Port: 5000, Access: sandbox.AccessPublic, Wake: sandbox.WakeNever, Host: sandbox.HostPreserve, Protocol: sandbox.ProtocolH2C, WebSocket: sandbox.WebSocketKeepAwake},
	} {
		if _, err := m.Expose(t.Context(), made.ID, port); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Unexpose(t.Context(), made.ID, 4000); err != nil {
		t.Fatal(err)
	}
	for name, restart := range map[string]guest.Restart{"web": guest.RestartOnWake, "db": guest.RestartAlways} {
		spec := guest.ProcessSpec{Command: guest.Command{Argv: []string{"sleep", "600"}, Cwd: "/", Env: map[string]string{"P": name}}, Name: name, Restart: restart}
		if _, err := m.StartProcess(t.Context(), made.ID, spec); err != nil {
			t.Fatal(err)
		}
	}
	name, longer, persist, labels := "shop", sandbox.Duration(2*time.Hour), sandbox.PersistDisk, map[string]string{"team": "y"}
	changed, err := m.Update(t.Context(), made.ID, sandbox.Patch{Name: &name, TTL: &longer, Labels: &labels, SleepAfter: &longer, StopAfter: &longer, Persist: &persist})
	if err != nil {
		t.Fatal(err)
	}
	return changed
}

func TestAdoptedSandboxHasItsLatestSettings(t *testing.T) {
	t.Run("stopped", func(t *testing.T) { adoptFurnished(t, false) })
	t.Run("running still", func(t *testing.T) { adoptFurnished(t, true) })
}

func adoptFurnished(t *testing.T, running bool) {
	n := sandboxtest.Open(t, nil)
	last := furnish(t, n)
	if running {
		n.Engine.Fail("stop", syscall.EIO)
	}
	loseRecord(t, n, last.ID)
	testkit.Eventually(t, "its stop was tried", func() bool {
		list := n.Manager.Info(t.Context()).Quarantined
		return len(list) == 1 && (list[0].Problem != "") == running && exited(t, n, last.ID) != running
	})
	if list := n.Manager.Info(t.Context()).Quarantined; len(list) != 1 || list[0].Name != "shop" {
		t.Fatalf("in quarantine: %+v", list)
	}
	before := time.Now()
	got, err := n.Manager.Adopt(t.Context(), owner, last.ID, "")
	if err != nil {
		t.Fatal(err)
	}
	if got.ExpiresAt.Before(before.Add(time.Duration(last.TTL))) {
		t.Errorf("its TTL of %s does not begin again: it expires at %s", last.TTL, got.ExpiresAt)
	}
	settings := func(sb sandbox.Sandbox) sandbox.Sandbox {
		return sandbox.Sandbox{
			ID: sb.ID, Name: sb.Name, Owner: sb.Owner, Image: sb.Image, ImageRef: sb.ImageRef, Size: sb.Size, Env: sb.Env, Labels: sb.Labels,
			SleepAfter: sb.SleepAfter, StopAfter: sb.StopAfter, TTL: sb.TTL, CreatedAt: sb.CreatedAt, Ports: sb.Ports, Declared: sb.Declared,
		}
	}
	if diff := cmp.Diff(settings(last), settings(got)); diff != "" {
		t.Errorf("adopted (-before +after):\n%s", diff)
	}
	if p, err := got.Process("web"); err != nil || p.State != guest.ProcessLost {
		t.Errorf("before its wake, process web is %+v, %v", p, err)
	}
	acquire(t, n.Manager, last.ID).Release()
	for _, name := range []string{"web", "db"} {
		want, _ := last.Process(name)
		now, _ := n.Manager.ByID(last.ID)
		if p, err := now.Process(name); err != nil || p.State != guest.ProcessRunning || p.ID != want.ID {
			t.Errorf("after its wake, process %s is %+v, %v; it was %+v", name, p, err, want)
		} else if (p.PID == want.PID) != running {
			t.Errorf("process %s is %d, was %d", name, p.PID, want.PID)
		}
	}
}

func TestSettingsOfAContainerAreRemovedWithIt(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	destroyed := furnish(t, n)
	noted := func(id sandbox.ID) bool {
		_, err := os.Lstat(originFile(n, id))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		return err == nil
	}
	info, err := os.Lstat(originFile(n, destroyed.ID))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("%v, %v", info, err)
	}
	if err := n.Manager.Destroy(t.Context(), destroyed.ID); err != nil {
		t.Fatal(err)
	}
	removed := furnish(t, n)
	loseRecord(t, n, removed.ID)
	if !noted(removed.ID) {
		t.Error("the settings of one in quarantine are gone")
	}
	if err := n.Manager.RemoveQuarantined(t.Context(), owner, removed.ID); err != nil {
		t.Fatal(err)
	}
	if noted(destroyed.ID) || noted(removed.ID) {
		t.Error("settings are left")
	}
	if sb := create(t, n.Manager, "plain"); noted(sb.ID) {
		t.Error("one that was not changed since its creation has a file: its label says it all")
	}
}

func TestSettingsAreNotedAgainAtStart(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"missing, as of an earlier version": os.Remove,
		"half":                              func(path string) error { return os.Truncate(path, 20) },
	} {
		t.Run(name, func(t *testing.T) {
			n := sandboxtest.Open(t, nil)
			sb := furnish(t, n)
			path := originFile(n, sb.ID)
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			n.Crash(t, func() {
				if err := damage(path); err != nil {
					t.Fatal(err)
				}
			})
			testkit.Eventually(t, "it is written again", func() bool { got, err := os.ReadFile(path); return err == nil && string(got) == string(want) })
		})
	}
}

func TestSettingsThatCannotBeNotedAreNotedLater(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	folder := filepath.Dir(originFile(n, sb.ID))
	if err := errors.Join(os.Remove(folder), os.WriteFile(folder, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Manager.Expose(t.Context(), sb.ID, sandbox.Port{Port: 3000}); err != nil {
		t.Fatalf("although its record is on disk: %v", err)
	}
	if err := os.Remove(folder); err != nil {
		t.Fatal(err)
	}
	mustSleep(t, n.Manager, sb.ID)
	testkit.Eventually(t, "it is noted", func() bool { _, err := os.Lstat(originFile(n, sb.ID)); return err == nil })
}

// Half a note is worse than the label.
func TestAdoptionUsesTheLabelWhereTheNoteIsDamaged(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := furnish(t, n)
	n.Crash(t, func() {
		if err := errors.Join(n.Store.DeleteSandbox(t.Context(), sb.ID), os.Truncate(originFile(n, sb.ID), 20)); err != nil {
			t.Fatal(err)
		}
	})
	got, err := n.Manager.Adopt(t.Context(), owner, sb.ID, "")
	if err != nil || got.Name != "app" || got.Size != "standard" || time.Duration(got.TTL) != time.Hour {
		t.Errorf("%+v, %v", got, err)
	}
}

// originFile is the path of a sandbox's settings in Deps.Origins.
func originFile(n *sandboxtest.Node, id sandbox.ID) string {
	return filepath.Join(n.Origins, string(id))
}
