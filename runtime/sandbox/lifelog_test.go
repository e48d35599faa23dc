package sandbox_test

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
)

// lifeLines returns the lines of the log about a sandbox that name it.
func lifeLines(t *testing.T, n *sandboxtest.Node, id sandbox.ID) (lines []map[string]any) {
	t.Helper()
	for text := range strings.Lines(n.Log.String()) {
		var line map[string]any
		if err := json.Unmarshal([]byte(text), &line); err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		if line["sandbox"] == string(id) && line["sandbox_name"] != nil {
			lines = append(lines, line)
		}
	}
	return lines
}

func TestLogHasEachChangeOfState(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	sb := create(t, n.Manager, "app")
	if _, err := n.Manager.Sleep(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	lease, err := n.Manager.Acquire(t.Context(), sb.ID, sandbox.CausePreview)
	if err != nil {
		t.Fatal(err)
	}
	lease.Release()
	if _, err := n.Manager.Stop(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	n.Engine.Fail("start", errors.New("no room"))
	if _, err := n.Manager.Acquire(t.Context(), sb.ID, sandbox.CauseExec); err == nil {
		t.Fatal("a broken engine woke it")
	}
	n.Engine.Fail("start", nil)
	if err := n.Manager.Destroy(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	if err := n.Manager.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	var messages []string
	for _, line := range lifeLines(t, n, sb.ID) {
		messages = append(messages, line["msg"].(string))
		if line["sandbox_name"] != "app" || line["owner"] != owner {
			t.Errorf("line %v", line)
		}
		switch line["msg"] {
		case "sandbox woke":
			if _, ok := line["duration_ms"].(float64); !ok || line["cause"] != "preview" || line["kind"] != "warm" {
				t.Errorf("line %v", line)
			}
		case "sandbox failed to wake":
			if line["level"] != "WARN" || line["cause"] != "exec" || line["error"] == nil {
				t.Errorf("line %v", line)
			}
		}
	}
	want := []string{"sandbox created", "sandbox slept", "sandbox woke", "sandbox stopped", "sandbox failed to wake", "sandbox destroyed"}
	if !slices.Equal(messages, want) {
		t.Errorf("lines %q, want %q", messages, want)
	}
}

// A visitor who wakes a broken sandbox again and again does not fill the log.
func TestLinesOfOneSandboxAreBounded(t *testing.T) {
	n := sandboxtest.Open(t, nil)
	loud, quiet := create(t, n.Manager, "loud"), create(t, n.Manager, "quiet")
	for range 100 {
		if _, err := n.Manager.Sleep(t.Context(), loud.ID); err != nil {
			t.Fatal(err)
		}
		lease, err := n.Manager.Acquire(t.Context(), loud.ID, sandbox.CausePreview)
		if err != nil {
			t.Fatal(err)
		}
		lease.Release()
	}
	if _, err := n.Manager.Sleep(t.Context(), quiet.ID); err != nil {
		t.Fatal(err)
	}
	if err := n.Manager.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if lines := len(lifeLines(t, n, loud.ID)); lines < 10 || lines > 150 {
		t.Errorf("%d lines of 200 events", lines)
	}
	if lines := len(lifeLines(t, n, quiet.ID)); lines != 2 {
		t.Errorf("%d lines of the other sandbox, want 2", lines)
	}
}
