package sandbox

import (
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

func TestCrashedIsTheLastOfProcessesThatAllFailed(t *testing.T) {
	start := time.Now()
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	exited := func(name string, code, when int) guest.Process {
		end := at(when)
		return guest.Process{Name: name, State: guest.ProcessExited, ExitCode: &code, StartedAt: at(1), ExitedAt: &end}
	}
	edit := func(p guest.Process, change func(*guest.Process)) guest.Process { change(&p); return p }
	running := guest.Process{Name: "web", State: guest.ProcessRunning, StartedAt: at(9)}
	always := func(restarts int) func(*guest.Process) {
		return func(p *guest.Process) { p.Restart, p.RestartCount = guest.RestartAlways, restarts }
	}
	for name, test := range map[string]struct {
		declared  string
		processes []guest.Process
		want      string
	}{
		"none is declared":           {"", []guest.Process{exited("web", 1, 2)}, ""},
		"it failed":                  {"web", []guest.Process{exited("web", 1, 2)}, "web"},
		"a signal ended it":          {"web", []guest.Process{edit(exited("web", 0, 2), func(p *guest.Process) { p.Signal = "SIGSEGV" })}, "web"},
		"it ended well":              {"web", []guest.Process{exited("web", 0, 2)}, ""},
		"it runs again":              {"web", []guest.Process{exited("web", 1, 2), running}, ""},
		"it has not started yet":     {"web", nil, ""},
		"it failed before the start": {"web", []guest.Process{edit(exited("web", 1, 2), func(p *guest.Process) { p.StartedAt = at(-1) })}, ""},
		"it was lost":                {"web", []guest.Process{{Name: "web", State: guest.ProcessLost, StartedAt: at(1)}}, ""},
		"it will be started again":   {"web", []guest.Process{edit(exited("web", 1, 2), always(crashLoop-1))}, ""},
		"it fails again and again":   {"web", []guest.Process{edit(exited("web", 1, 2), always(crashLoop))}, "web"},
		"one of two failed":          {"web db", []guest.Process{exited("db", 1, 2), running}, ""},
		"both failed, this one last": {"web db", []guest.Process{exited("web", 1, 2), exited("db", 1, 3)}, "db"},
		"another may listen":         {"web", []guest.Process{exited("web", 1, 2), {Name: "job", State: guest.ProcessRunning, StartedAt: at(1)}}, ""},
	} {
		sb := Sandbox{StartedAt: start, Processes: test.processes}
		for _, declared := range strings.Fields(test.declared) {
			sb.Declared = append(sb.Declared, guest.ProcessSpec{Name: declared})
		}
		if p, ok := sb.Crashed(); p.Name != test.want || ok != (test.want != "") {
			t.Errorf("%s: %q, %v; want %q", name, p.Name, ok, test.want)
		}
	}
}

func TestLastLinesAreBoundedText(t *testing.T) {
	for name, test := range map[string]struct{ output, want string }{
		"nothing":    {"", ""},
		"lines":      {"one\ntwo\n", "one\ntwo"},
		"not UTF-8":  {"a\xff\xfeb", "ab"},
		"colours":    {"\x1b[31mred\x1b[0m\r\n", "[31mred[0m"},
		"many lines": {strings.Repeat("x\n", 30), strings.TrimSpace(strings.Repeat("x\n", lastOutputLines))},
		"a long one": {strings.Repeat("x", 3*lastOutputBytes), strings.Repeat("x", lastOutputBytes)},
	} {
		if got := lastLines([]byte(test.output)); got != test.want {
			t.Errorf("%s: %q", name, got)
		}
	}
}
