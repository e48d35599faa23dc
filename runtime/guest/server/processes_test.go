package server

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

func TestListOfAllProcessesFitsInAResponse(t *testing.T) {
	const text = "\x01<\xff" // six bytes each in JSON
	long := strings.Repeat(text, maxPath)
	for name, spec := range map[string]guest.ProcessSpec{
		"command": {Command: guest.Command{Command: long}}, "one argument": {Command: guest.Command{Argv: []string{long}}}, "many arguments": {Command: guest.Command{Argv: strings.SplitAfter(long, "\xff")}},
	} {
		t.Run(name, func(t *testing.T) {
			ps := newProcesses(&Server{cfg: Config{LogDir: t.TempDir()}})
			spec.Cwd, spec.Name, spec.Restart = "/"+long, strings.Repeat("n", maxName), guest.RestartOnWake
			p := &process{spec: spec}
			if err := ps.reserve(p); err != nil {
				t.Fatal(err)
			}
			code, now := 255, time.Now()
			p.view.PID, p.view.State, p.view.StartedAt, p.view.ExitedAt = 4<<20, guest.ProcessExited, now, &now
			p.view.ExitCode, p.view.Signal, p.view.RestartCount = &code, "SIGSTKFLT", 1<<31
			p.view.LogFile = strings.Repeat("l", 200)
			list := make([]guest.Process, maxProcesses+maxHistory)
			for i := range list {
				list[i] = p.view
			}
			b, err := json.Marshal(list)
			if err != nil || len(b) > guest.MaxJSON {
				t.Errorf("it has %d bytes, %v", len(b), err)
			}
		})
	}
}

func TestProcessIsFoundByItsIDOverAllItsLives(t *testing.T) {
	ps := newProcesses(&Server{cfg: Config{LogDir: t.TempDir()}, events: newHub()})
	p := &process{restart: t.Context(), log: &processLog{}}
	if err := ps.reserve(p); err != nil {
		t.Fatal(err)
	}
	for pid := 1; pid <= 40; pid++ {
		if !ps.started(p, &processRun{running: &running{tree: &tree{root: &child{pid: pid}}}}) {
			t.Fatal("it shall not start")
		}
		if found, err := ps.find(p.view.ID); err != nil || found != p {
			t.Errorf("life %d: found %v, %v", pid, found, err)
		}
	}
	if err := ps.reserve(&process{spec: guest.ProcessSpec{ID: p.view.ID}}); err == nil {
		t.Error("another process got the same id")
	}
}
