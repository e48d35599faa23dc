package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/runtime/jupyter/jupytertest"
	"github.com/doze-run/doze/testkit"
)

func TestCodeKeepsItsState(t *testing.T) {
	t.Setenv("PATH", jupytertest.Install(t)+":"+os.Getenv("PATH"))
	r := newRig(t)
	r.ok("create", "a")
	r.ok("code", "a", "set x 7")
	if got := r.doze("code", "a", "print out\nwarn err\nget x"); got.out != "out\n7\n" || got.err != "err\n" || got.code != 0 {
		t.Errorf("%+v", got)
	}
	if got := r.doze("code", "a", "raise Error broken"); got.code != 1 || !strings.Contains(got.err, "broken") || strings.Contains(got.err, "\x1b") {
		t.Errorf("%+v", got)
	}
	if got := r.doze("code", "a", "--timeout", "50ms", "loop"); got.code != 1 || !strings.Contains(got.err, "exceeded its timeout") {
		t.Errorf("%+v", got)
	}
	folder := t.TempDir()
	if out := r.ok("code", "a", "--save", folder, "show text/html <b>rich</b>\nshow image/png aGk="); out != folder+"/result-1.html\n"+folder+"/result-2.png\n" {
		t.Errorf("saved %q", out)
	}
	if b, err := os.ReadFile(folder + "/result-2.png"); string(b) != "hi" || err != nil {
		t.Errorf("saved %q, %v", b, err)
	}
	if out := r.ok("code", "a", "show text/html <b>rich</b>\nupdate new"); out != "rich\nnew\n" {
		t.Errorf("printed %q", out)
	}
	if out := r.ok("context", "create", "a", "typescript", "ts"); out != "ts\n" {
		t.Errorf("created %q", out)
	}
	if result := decodeJSON[types.CodeResult](t, r.ok("code", "a", "--context", "ts", "--json", "value 2")); len(result.Results) != 1 || result.Results[0].Data["text/plain"] != "2" {
		t.Errorf("%+v", result)
	}
	if out := r.ok("context", "ls", "a"); !regexp.MustCompile(`(?m)^ts +typescript +p-\w{8} +running`).MatchString(out) {
		t.Errorf("listed %q", out)
	}
	r.ok("context", "restart", "a", "python")
	if got := r.doze("code", "a", "get x"); got.code != 1 || !strings.Contains(got.err, "not defined") {
		t.Errorf("%+v", got)
	}
	r.ok("context", "interrupt", "a", "python")
	r.ok("context", "rm", "a", "ts")
	if got := r.doze("code", "a", "--context", "ts", "value 2"); got.code == 0 || !strings.Contains(got.err, "no context") {
		t.Errorf("%+v", got)
	}
}

func TestUpdatedValuesReplaceTheirFiles(t *testing.T) {
	var values []types.CodeValue
	add := func(update bool, id string, data map[string]any) {
		data["text/plain"] = id
		values = append(values, types.CodeValue{DisplayID: id, Update: update, Data: data})
	}
	add(false, "text", map[string]any{})
	add(false, "a", map[string]any{"text/html": "1"})
	add(false, "b", map[string]any{"text/html": "2"})
	for range 100 {
		add(true, "a", map[string]any{"text/html": "later"})
	}
	add(true, "b", map[string]any{"image/png": "aGk="})
	add(false, "", map[string]any{"text/html": "4"})
	add(true, "", map[string]any{"text/html": "5"}) // updates no other value
	r := fakeNode(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, v := range values {
			text, _ := json.Marshal(v)
			fmt.Fprintf(w, "event: result\ndata: %s\n\n", text)
		}
		fmt.Fprint(w, "event: complete\ndata: {}\n\n")
	})
	folder := t.TempDir()
	want := strings.ReplaceAll("text\n/result-1.html\n/result-2.html\n/result-2.png\n/result-3.html\n/result-4.html\n", "/", folder+"/")
	if out := r.ok("code", "a", "--save", folder, "x"); out != want {
		t.Errorf("printed %q, not %q", out, want)
	}
	got := map[string]string{}
	files, _ := filepath.Glob(folder + "/*")
	for _, file := range files {
		b, _ := os.ReadFile(file)
		got[filepath.Base(file)] = string(b)
	}
	testkit.Diff(t, "the files", map[string]string{"result-1.html": "later", "result-2.png": "hi", "result-3.html": "4", "result-4.html": "5"}, got)
}

// Code that ignores the interrupt exceeds its timeout without an exception.
func TestCodeThatExceedsItsTimeoutFails(t *testing.T) {
	r := fakeNode(t, func(w http.ResponseWriter, req *http.Request) {
		end := types.CodeEnd{TimedOut: true}
		if req.Header.Get("Accept") == "text/event-stream" {
			text, _ := json.Marshal(types.CodeComplete{CodeEnd: end})
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprintf(w, "event: complete\ndata: %s\n\n", text)
			return
		}
		json.NewEncoder(w).Encode(types.CodeResult{CodeEnd: end})
	})
	for _, flag := range []string{"--json", "--json=false"} {
		if got := r.doze("code", "a", flag, "x"); got.code != 1 {
			t.Errorf("%s: %+v", flag, got)
		}
	}
}
