package sandbox

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
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
