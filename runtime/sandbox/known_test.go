package sandbox

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/jupyter"
)

// A hostile guest may say whatever a line of its event stream takes.
func TestReportedProcessesAreBoundedInTheRecord(t *testing.T) {
	for _, text := range []string{"a", "\x01", `"`, "<", "é", "\xff", "\u2028"} {
		t.Run(fmt.Sprintf("%q", text), func(t *testing.T) {
			long := strings.Repeat(text, 12_000/len(text))
			var list []guest.Process
			for i := range 2 * maxProcesses {
				p := guest.Process{PID: i + 1, Name: long, Command: long, Cwd: long, Signal: long, LogFile: long,
					Argv: strings.Split(strings.Repeat(" ", 6_000), " "), State: guest.ProcessExited}
				if i == 0 {
					p.State = guest.ProcessRunning
				}
				list = newest(append(list, shorten(p, maxProcessText)))
			}
			b, err := json.Marshal(list)
			if err != nil {
				t.Fatal(err)
			}
			if len(b) > maxKnownText+2 {
				t.Errorf("the processes take %d bytes, more than %d", len(b), maxKnownText)
			}
			if len(list) < 4 || list[0].PID != 1 || list[len(list)-1].PID != 2*maxProcesses {
				t.Errorf("%d are kept, the first with pid %d", len(list), list[0].PID)
			}
			brief, err := json.Marshal(shorten(list[0], maxEventText))
			if err != nil || len(brief) > 6*maxEventText+processOverhead {
				t.Errorf("in an event it takes %d bytes, error %v", len(brief), err)
			}
		})
	}
}

// The store refuses a record of 800 KiB, and with it all further changes of its sandbox.
func TestLargestRecordIsStored(t *testing.T) {
	const maxRecord, reserve = 800 << 10, 16 << 10
	at := time.Date(2026, 11, 23, 23, 59, 59, 999_999_999, time.FixedZone("", -86340))
	code, signal := 255, strings.Repeat("S", 16)
	for _, text := range []string{"a", "<", `"`} {
		t.Run(text, func(t *testing.T) {
			// longest returns the longest text that is accepted.
			longest := func(accepted func(text string) error) string {
				return strings.Repeat(text, sort.Search(1<<20, func(n int) bool { return accepted(strings.Repeat(text, n+1)) != nil }))
			}
			long := strings.Repeat(text, maxProcessText)
			sb := Sandbox{
				ID: NewID(), Name: strings.Repeat("a", 63), Owner: long[:256], Image: long[:maxImage], ImageRef: long[:maxImage], Size: long[:64],
				State: StateDestroyed, StateReason: ReasonGuestUnresponsive, SleepAfter: math.MaxInt64, StopAfter: math.MaxInt64, TTL: math.MaxInt64,
				ExpiresAt: at, CreatedAt: at, LastActiveAt: at, StateSince: at, StartedAt: at, HoldUntil: at, Warm: Languages(),
				Condition: Condition{Code: ConditionRecoveryFailed, Message: cutText(long, maxErrorText), Since: at},
				Limits: Limits{CPUs: math.Pi, Memory: math.MaxInt64, PIDs: math.MaxInt64, Quotas: Quotas{
					UserNamespaces: math.MaxInt64, InotifyInstances: math.MaxInt64, InotifyWatches: math.MaxInt64,
					PendingSignals: math.MaxInt64, MessageQueueBytes: math.MaxInt64,
				}},
			}

			// Set by clients.
			sb.Env = map[string]string{"A": longest(func(value string) error {
				trial := Sandbox{Env: map[string]string{"A": value}}
				return cmp.Or(validateEnv(trial.Environment()), trial.validateStoredEnv())
			})}
			change := longest(func(value string) error {
				trial := Sandbox{Env: sb.Env, EnvChanges: map[string]*string{"A": &value}}
				return cmp.Or(validateEnv(trial.Environment()), trial.validateStoredEnv())
			})
			sb.EnvChanges = map[string]*string{"A": &change}
			labels := func(value string) map[string]string {
				list := map[string]string{}
				for i := range maxLabels {
					list[fmt.Sprintf("%063d", i)] = value
				}
				return list
			}
			sb.Labels = labels(longest(func(value string) error { return validateLabels(labels(value)) }))
			for i := range maxPorts {
				sb.Ports = append(sb.Ports, Port{
					Port: uint16(math.MaxUint16 - i), Access: AccessPublic, Token: newPortToken(), Wake: WakeNavigation, Host: HostPreserve,
					Protocol: ProtocolHTTP1, WebSocket: WebSocketKeepAwake, CreatedAt: at,
				})
			}
			declared := func(value string) guest.ProcessSpec {
				return guest.ProcessSpec{ID: guest.NewProcessID(), Restart: guest.RestartAlways, Command: guest.Command{Env: map[string]string{"A": value}}}
			}
			sb.Declared = []guest.ProcessSpec{declared(longest(func(value string) error { return mayDeclare(nil, declared(value)) }))}
			for i := range maxKnownContext {
				c := Context{
					ID: long[:maxContextID], Language: TypeScript, Cwd: cutText(long, maxContextCwd), State: guest.ProcessExited, ExitCode: &code, Signal: signal,
					Reason: ReasonGuestUnresponsive, StartedAt: at, ExitedAt: &at, Process: guest.NewProcessID(), Kernel: jupyter.NewConnection(freePorts(sb.Contexts)),
				}
				if i == 0 {
					c.Env = map[string]string{"A": cutText(strings.Repeat(text, maxContextEnv), maxContextEnv)}
				}
				sb.Contexts, _ = contexts.bound(append(sb.Contexts, c))
			}

			// Reported by the guest.
			for range 2 * maxProcesses {
				sb.Processes = newest(append(sb.Processes, shorten(guest.Process{
					ID: guest.NewProcessID(), PID: math.MaxInt64, State: guest.ProcessExited, Restart: guest.RestartAlways, ExitCode: &code, Signal: signal,
					RestartCount: math.MinInt64, StartedAt: at, ExitedAt: &at,
				}, maxProcessText)))
			}
			for i := range maxSessions {
				s := guest.Session{ID: long[:64], PID: math.MaxInt64, Shell: long[:16], Cwd: long, Command: long[:guest.MaxSessionCommand], State: guest.ProcessRunning, StartedAt: at, ExitedAt: &at, Unresponsive: true}
				if i >= maxSessions-maxEndedSessions {
					s.State, s.ExitCode, s.Signal = guest.ProcessExited, &code, signal
				}
				sb.Sessions, _ = sessions.bound(append(sb.Sessions, Session{Session: shortenSession(s)}))
			}
			sb.Sessions = lostPrograms(sb.Sessions, ReasonGuestUnresponsive)
			for range 2 * maxTerminals {
				sb.Terminals, _ = terminals.bound(append(sb.Terminals, Terminal{Terminal: shortenTerminal(guest.Terminal{
					ID: long[:64], PID: math.MaxInt64, Command: long[:guest.MaxTerminalCommand], TerminalSize: guest.TerminalSize{Cols: math.MaxUint16, Rows: math.MaxUint16},
					State: guest.ProcessExited, ExitCode: &code, Signal: signal, StartedAt: at, ExitedAt: &at,
				})}))
			}
			sb.Terminals = lostPrograms(sb.Terminals, ReasonGuestUnresponsive)
			for i := range guest.MaxListening {
				sb.Listening = append(sb.Listening, guest.Listening{
					Port: uint16(math.MaxUint16 - i), Addresses: slices.Repeat([]string{"1111:1111:1111:1111:1111:1111:111.111.111.111"}, 4),
					PID: math.MaxInt64, Program: long[:64], Process: guest.NewProcessID(),
				})
			}
			shortenListening(sb.Listening)

			parts := map[string]any{
				"env": []any{sb.Env, sb.EnvChanges}, "labels": sb.Labels, "ports": sb.Ports, "declared": sb.Declared, "contexts": sb.Contexts,
				"processes": sb.Processes, "sessions": sb.Sessions, "terminals": sb.Terminals, "listening": sb.Listening, "all": sb,
			}
			size := map[string]int{}
			for name, part := range parts {
				b, err := json.Marshal(part)
				if err != nil {
					t.Fatal(err)
				}
				size[name] = len(b)
			}
			if size["all"] > maxRecord-reserve {
				t.Errorf("the record has %d bytes: %v", size["all"], size)
			}
			for name, most := range map[string]int{"sessions": 100 << 10, "terminals": 96 << 10, "contexts": 112 << 10, "processes": maxKnownText + 2, "env": maxEnvStored + 16, "labels": maxLabelBytes + 2} {
				if size[name] > most {
					t.Errorf("%s: %d bytes, more than %d", name, size[name], most)
				}
			}
		})
	}
}
