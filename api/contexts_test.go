package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/jupyter"
	"github.com/doze-run/doze/runtime/jupyter/jupytertest"
)

// newInterpreters returns a server whose sandboxes have interpreters, which are fake kernels.
func newInterpreters(t *testing.T) *server {
	t.Setenv("PATH", jupytertest.Install(t)+":"+os.Getenv("PATH"))
	s := newServer(t, Limits{})
	s.create("box")
	return s
}

func (s *server) run(name string, body map[string]any) types.CodeResult {
	s.t.Helper()
	return must[types.CodeResult](s, http.StatusOK, "POST", "/sandbox/box/contexts/"+name+"/run", body)
}

func TestContextExecutesCode(t *testing.T) {
	s := newInterpreters(t)
	dir := t.TempDir()
	opened := s.do("POST", "/sandbox/box/contexts", map[string]any{"id": "a", "language": "python", "cwd": dir, "env": map[string]string{"A": "1"}})
	var c types.Context
	if err := json.Unmarshal(opened.body, &c); err != nil || opened.status != http.StatusCreated || c.ID != "a" || c.Language != types.LanguagePython || c.Cwd != dir {
		t.Fatalf("got %d %s", opened.status, opened.body)
	}
	if strings.Contains(string(opened.body), "key") {
		t.Errorf("the key is in %s", opened.body)
	}
	if got := must[types.Context](s, http.StatusOK, "GET", strings.TrimPrefix(opened.header.Get("Location"), Prefix), nil); got.Process != c.Process {
		t.Errorf("Location %s is %+v", opened.header.Get("Location"), got)
	}
	got := s.run("a", map[string]any{"code": "print out\nwarn err\nenv A\nshow text/html <b>rich</b>\ncwd"})
	if got.Stdout != "out\n" || got.Stderr != "err\n" || len(got.Results) != 3 || got.ExecutionCount != 1 || got.Error != nil || got.DurationMS <= 0 {
		t.Fatalf("got %+v", got)
	}
	if v := got.Results[0]; !v.Main || v.Data["text/plain"] != "1" {
		t.Errorf("got %+v", v)
	}
	if v := got.Results[1]; v.Main || v.Data["text/html"] != "<b>rich</b>" || v.DisplayID != "d1" {
		t.Errorf("got %+v", v)
	}
	got = s.run("a", map[string]any{"code": "print out\nraise Error broken"})
	if got.Error == nil || got.Error.Name != "Error" || got.Error.Message != "broken" || len(got.Error.Traceback) == 0 || got.Stdout != "out\n" {
		t.Errorf("got %+v", got)
	}
	stream := s.open("POST", "/sandbox/box/contexts/a/run", map[string]any{"code": "print out\nwarn err\nvalue 2\nshow text/html rich\nupdate new\nclear wait\nraise Error broken", "stream": true})
	if out := parse[types.Output](t, stream.expect("stdout")); out.Data != "out\n" {
		t.Errorf("got %+v", out)
	}
	if out := parse[types.Output](t, stream.expect("stderr")); out.Data != "err\n" {
		t.Errorf("got %+v", out)
	}
	if v := parse[types.CodeValue](t, stream.expect("result")); !v.Main || v.Update || v.Data["text/plain"] != "2" {
		t.Errorf("got %+v", v)
	}
	if v := parse[types.CodeValue](t, stream.expect("result")); v.Main || v.Update || v.Data["text/html"] != "rich" {
		t.Errorf("got %+v", v)
	}
	if v := parse[types.CodeValue](t, stream.expect("result")); !v.Update || v.DisplayID != "d1" || v.Data["text/plain"] != "new" {
		t.Errorf("got %+v", v)
	}
	if v := parse[types.CodeClear](t, stream.expect("clear")); !v.Wait {
		t.Errorf("got %+v", v)
	}
	if e := parse[types.CodeError](t, stream.expect("error")); e.Name != "Error" {
		t.Errorf("got %+v", e)
	}
	if end := parse[types.CodeComplete](t, stream.expect("complete")); end.ExecutionCount != 3 || end.TimedOut || end.Truncated {
		t.Errorf("got %+v", end)
	}
	if list := must[types.ContextList](s, http.StatusOK, "GET", "/sandbox/box/contexts", nil); len(list.Contexts) != 1 || list.Contexts[0].Process != c.Process {
		t.Errorf("got %+v", list)
	}
	if closed := must[types.Context](s, http.StatusOK, "DELETE", "/sandbox/box/contexts/a", nil); closed.State != types.ProcessStateExited {
		t.Errorf("got %+v", closed)
	}
	s.refused(problem.ContextNotFound, "POST", "/sandbox/box/contexts/a/run", map[string]any{"code": "value 2"})
}

func TestClearedOutputIsNotReturned(t *testing.T) {
	s := newInterpreters(t)
	for code, want := range map[string]string{
		"print a\nvalue b\nclear\nprint c":              "c\n",
		"print a\nclear wait\nprint c":                  "c\n",
		"print a\nclear wait":                           "a\n",
		"print a\nclear wait\nclear\nprint c\nprint d":  "c\nd\n",
		"show text/html a\nupdate b\nprint c\nprint d":  "c\nd\nb",
		"show text/html a\nclear\nupdate b\nprint only": "only\nb",
	} {
		got := s.run("python", map[string]any{"code": code})
		text := got.Stdout
		for _, v := range got.Results {
			text += v.Data["text/plain"].(string)
		}
		if text != want {
			t.Errorf("%q: got %q, want %q", code, text, want)
		}
	}
}

func TestOutputOfCodeIsBounded(t *testing.T) {
	s := newInterpreters(t)
	got := s.run("python", map[string]any{"code": "flood 100000", "max_output_bytes": 1000})
	if n := len(got.Stdout); n > 1000 || n < 500 || !got.Truncated {
		t.Errorf("%d bytes, truncated %v", n, got.Truncated)
	}
	for code, wantValue := range map[string]bool{"print x\nbig 5000": false, "print x\nbig 200": true} {
		got := s.run("python", map[string]any{"code": code, "max_output_bytes": 1000})
		if got.Stdout != "x\n" || got.Truncated == wantValue || (len(got.Results) == 1) != wantValue {
			t.Errorf("%q: %d bytes, %d results, truncated %v", code, len(got.Stdout), len(got.Results), got.Truncated)
		}
	}
}

func TestValuesWithoutFormsAreBounded(t *testing.T) {
	s := newInterpreters(t)
	got := s.run("python", map[string]any{"code": "empty 1000", "max_output_bytes": 10_000})
	if !got.Truncated || len(got.Results) == 0 || len(got.Results) > 100 {
		t.Errorf("%d results, truncated %v", len(got.Results), got.Truncated)
	}
}

// An update replaces a value, also in the limit.
func TestUpdatesOfAValueAreNotAdded(t *testing.T) {
	o := codeOutput{limit: 3000}
	value := func(text string, update bool) jupyter.Event {
		data := json.RawMessage(strconv.Quote(text + strings.Repeat("x", 1000)))
		return jupyter.Event{Kind: jupyter.Result, Result: &jupyter.Rich{Data: map[string]json.RawMessage{"text/plain": data}, DisplayID: "d", Update: update}}
	}
	o.add(value("first", false))
	for i := range 100 {
		o.add(value(fmt.Sprintf("%d-", i), true))
	}
	got := o.end(types.CodeEnd{})
	if text := string(got.Results[0].Data["text/plain"].(json.RawMessage)); got.Truncated || len(got.Results) != 1 || !strings.HasPrefix(text, `"99-`) {
		t.Errorf("got %+v", got)
	}
	o.add(value("with another", false))
	if o.add(value("with a third", false)); !o.truncated || len(o.results) != 2 {
		t.Errorf("%d results, truncated %v", len(o.results), o.truncated)
	}
}

func TestLongTextOfCodeIsSentInParts(t *testing.T) {
	s := newInterpreters(t)
	text := strings.Repeat("ä", 100_000)
	stream := s.open("POST", "/sandbox/box/contexts/python/run", map[string]any{"code": "print " + text, "stream": true})
	var got strings.Builder
	for got.Len() < 2*100_000+1 {
		part := parse[types.Output](t, stream.expect("stdout"))
		if len(part.Data) > 64<<10 || part.Encoding != "" {
			t.Fatalf("a part has %d bytes and the encoding %q", len(part.Data), part.Encoding)
		}
		got.WriteString(part.Data)
	}
	if got.String() != text+"\n" {
		t.Errorf("got %d bytes", got.Len())
	}
	stream.expect("complete")
}

func TestTimeoutAndInterruptKeepTheContext(t *testing.T) {
	s := newInterpreters(t)
	got := s.run("python", map[string]any{"code": "set x 7\nloop", "timeout": "50ms"})
	if !got.TimedOut || got.Error == nil || got.Error.Name != "KeyboardInterrupt" {
		t.Errorf("got %+v", got)
	}
	stream := s.open("POST", "/sandbox/box/contexts/python/run", map[string]any{"code": "print on\nloop", "stream": true})
	stream.expect("stdout")
	s.refused(problem.ContextBusy, "POST", "/sandbox/box/contexts/python/run", map[string]any{"code": "value 2", "timeout": "50ms"})
	must[types.Context](s, http.StatusOK, "POST", "/sandbox/box/contexts/python/interrupt", nil)
	stream.expect("error")
	if end := parse[types.CodeComplete](t, stream.expect("complete")); end.TimedOut {
		t.Errorf("got %+v", end)
	}
	if got := s.run("python", map[string]any{"code": "get x"}); len(got.Results) != 1 || got.Results[0].Data["text/plain"] != "7" {
		t.Errorf("got %+v", got)
	}
}

func TestEndedContextIsGoneWithTheReason(t *testing.T) {
	s := newInterpreters(t)
	code := map[string]any{"code": "value 2"}
	s.run("python", code)
	s.run("javascript", code)
	p := s.refused(problem.ContextLost, "POST", "/sandbox/box/contexts/python/run", map[string]any{"code": "exit"})
	if !strings.Contains(p.Detail, "exited with code 3") || !strings.Contains(p.Detail, "/contexts/python/restart") {
		t.Errorf("got %+v", p)
	}
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/box/stop", nil)
	for name, want := range map[string]string{"python": "code 3", "javascript": "its sandbox stopped (requested)"} {
		if p := s.refused(problem.ContextLost, "POST", "/sandbox/box/contexts/"+name+"/run", code); !strings.Contains(p.Detail, want) {
			t.Errorf("got %q, not %q", p.Detail, want)
		}
		s.refused(problem.ContextLost, "POST", "/sandbox/box/contexts/"+name+"/interrupt", nil)
	}
	got := must[types.Context](s, http.StatusOK, "GET", "/sandbox/box/contexts/javascript", nil)
	if got.State != types.ProcessStateLost || got.Reason != "requested" || got.ExitCode != nil {
		t.Errorf("got %+v", got)
	}
	must[types.Context](s, http.StatusOK, "DELETE", "/sandbox/box/contexts/javascript", nil)
	if state := must[types.Sandbox](s, http.StatusOK, "GET", "/sandbox/box", nil).State; state != types.StateStopped {
		t.Errorf("the refused requests left it %s", state)
	}
	must[types.Context](s, http.StatusOK, "POST", "/sandbox/box/contexts/python/restart", nil)
	s.run("python", code)
}

func TestContextRefusals(t *testing.T) {
	s := newInterpreters(t)
	open := func(code problem.Code, body map[string]any) problem.Problem {
		t.Helper()
		return s.refused(code, "POST", "/sandbox/box/contexts", body)
	}
	open(problem.RequestInvalid, map[string]any{"language": "cobol"})
	open(problem.RequestInvalid, map[string]any{})
	open(problem.RequestInvalid, map[string]any{"language": "python", "id": "a/b"})
	open(problem.RequestInvalid, map[string]any{"language": "python", "id": "javascript"})
	open(problem.RequestInvalid, map[string]any{"language": "python", "cwd": "relative"})
	open(problem.PathNotFound, map[string]any{"language": "python", "cwd": "/missing"})
	p := open(problem.InterpreterNotInstalled, map[string]any{"language": "python", "env": map[string]string{"PATH": "/none"}})
	if p.Status != http.StatusNotImplemented || !strings.Contains(p.Detail, "doze/python") || !strings.Contains(p.Detail, "python3-ipykernel") {
		t.Errorf("got %+v", p)
	}
	p = open(problem.InterpreterFailed, map[string]any{"language": "python", "env": map[string]string{"PATH": jupytertest.Install(t), "KERNEL_EXIT": "2"}})
	if !strings.Contains(p.Detail, "unknown option") {
		t.Errorf("got %+v", p)
	}
	s.refused(problem.ContextNotFound, "GET", "/sandbox/box/contexts/none", nil)
	s.refused(problem.ContextNotFound, "POST", "/sandbox/box/contexts/none/run", map[string]any{"code": "1"})
	s.refused(problem.RequestInvalid, "POST", "/sandbox/box/contexts/python/run", map[string]any{"code": "1", "timeout": "25h"})
	must[types.Context](s, http.StatusCreated, "POST", "/sandbox/box/contexts", map[string]any{"language": "python", "id": "a"})
	open(problem.ContextExists, map[string]any{"language": "python", "id": "a"})
}

// A client that leaves ends its code and not the context.
func TestDisconnectedClientInterruptsItsCode(t *testing.T) {
	s := newInterpreters(t)
	stream := s.open("POST", "/sandbox/box/contexts/python/run", map[string]any{"code": "set x 7\nprint on\nloop", "stream": true})
	stream.expect("stdout")
	stream.close()
	if got := s.run("python", map[string]any{"code": "get x"}); len(got.Results) != 1 || got.Results[0].Data["text/plain"] != "7" {
		t.Errorf("got %+v", got)
	}
}
