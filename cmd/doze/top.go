package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/cmd/internal/usage"
)

func (a *app) topCommand() *cobra.Command {
	var once bool
	var interval time.Duration
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Watch sandboxes",
		Long:  "Show sandboxes with their memory and their CPU use since the last update. This never wakes a sandbox. q or Ctrl-C exits.",
		Args:  wants(0, 0),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, _ []string) error {
			if interval < 100*time.Millisecond {
				return usage.Errorf("--interval %s is too short; use at least 100ms", interval)
			}
			t := &top{node: node}
			screen, ok := a.out.(*os.File)
			if once || a.json || !ok || !isTerminal(screen) {
				return t.once(ctx, a)
			}
			return t.watch(ctx, a.in, screen, interval)
		}),
	}
	cmd.Flags().BoolVar(&once, "once", false, "print the table once and exit")
	cmd.Flags().DurationVar(&interval, "interval", 2*time.Second, "time between updates")
	return cmd
}

// top is a table of sandboxes that is read again and again.
type top struct {
	node *client.Client
	seen map[string]*sample // by id, of the last table
}

// sample is what readings have found out about a sandbox.
type sample struct {
	at      time.Time // zero: the CPU time was unknown
	seconds float64   // CPU time
	share   float64   // of a core, that it used before; less than 0 if unknown

	since time.Time // state_since when its wakes were counted
	seq   uint64    // of the last event that was read
	wakes int
}

// sample samples the sandboxes of one reading.
func (t *top) sample(sandboxes []types.Sandbox) {
	now, next := time.Now(), make(map[string]*sample, len(sandboxes))
	for _, sb := range sandboxes {
		s := new(sample)
		if before := t.seen[sb.ID]; before != nil {
			*s = *before
		}
		at, seconds := s.at, s.seconds
		s.at, s.share = time.Time{}, -1
		if sb.Usage != nil {
			s.at, s.seconds = now, sb.Usage.CPUSeconds
			if !at.IsZero() && s.seconds >= seconds && now.After(at) {
				s.share = (s.seconds - seconds) / now.Sub(at).Seconds()
			}
		}
		next[sb.ID] = s
	}
	t.seen = next
}

// usage returns what the table has of a sandbox's CPU and memory.
func (t *top) usage(sb types.Sandbox) (cpu, memory string) {
	cpu, memory = "-", "-"
	if share := t.seen[sb.ID].share; share >= 0 {
		cpu = fmt.Sprintf("%.1f%%", share*100)
	}
	if sb.Usage != nil && sb.Usage.MemoryBytes > 0 {
		memory = size(sb.Usage.MemoryBytes)
	}
	return cpu, memory
}

// reading is what the node reports at one moment.
type reading struct {
	Node      types.Node      `json:"node"`
	Sandboxes []types.Sandbox `json:"sandboxes"`
}

func (t *top) poll(ctx context.Context) (reading, error) {
	node, err := t.node.Node(ctx)
	if err != nil {
		return reading{}, err
	}
	sandboxes, err := t.node.List(ctx, client.Filter{Usage: true})
	if err != nil {
		return reading{}, err
	}
	slices.SortStableFunc(sandboxes, func(x, y types.Sandbox) int {
		return cmp.Or(rank(x.State)-rank(y.State), y.LastActiveAt.Compare(x.LastActiveAt))
	})
	return reading{node, sandboxes}, nil
}

// rank puts what uses most above.
func rank(state types.State) int {
	// The index of unknown states is -1: they rank last.
	order := []types.State{types.StateArchived, types.StateStopped, types.StateAsleep, types.StateStarting, types.StateRunning}
	return -slices.Index(order, state)
}

func (t *top) once(ctx context.Context, a *app) error {
	got, err := t.poll(ctx)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(got)
	}
	return t.draw(ctx, a.out, got, len(got.Sandboxes))
}

// draw writes the table with at most that many sandboxes.
func (t *top) draw(ctx context.Context, w io.Writer, got reading, rows int) error {
	t.sample(got.Sandboxes)
	engine := "engine ok"
	if !got.Node.Engine.OK {
		engine = "engine: " + got.Node.Engine.Error
	}
	var counts []string
	for _, state := range states {
		if n := got.Node.Sandboxes[state]; n > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", n, state))
		}
	}
	fmt.Fprintln(w, clean(fmt.Sprintf("node %s, up %s, %s. In use: %d, waiting: %d. %s", got.Node.ID, ago(got.Node.StartedAt), engine,
		got.Node.Leases, got.Node.Waiters, cmp.Or(strings.Join(counts, ", "), "-"))))
	fmt.Fprintln(w)
	table := newTable(w, "NAME", "STATE", "FOR", "CPU", "MEMORY", "WAKES", "ACTIVE", "PORTS", "SIZE", "IMAGE")
	for _, sb := range got.Sandboxes[:min(rows, len(got.Sandboxes))] {
		cpu, memory := t.usage(sb)
		ports := cmp.Or(strings.Join(portNumbers(sb.Ports), ","), "-")
		table.row(sb.Name, sb.State, ago(sb.StateSince), cpu, memory, t.countWakes(ctx, sb), ago(sb.LastActiveAt), ports, sb.Size, sb.Image)
	}
	if err := table.flush(); err != nil {
		return err
	}
	if more := len(got.Sandboxes) - rows; more > 0 {
		fmt.Fprintf(w, "… and %d more\n", more)
	}
	return nil
}

// countWakes returns how often a sandbox woke, as far as its timeline goes. It reads only
// new events, and only when the sandbox's state has changed.
func (t *top) countWakes(ctx context.Context, sb types.Sandbox) string {
	s := t.seen[sb.ID]
	if !s.since.Equal(sb.StateSince) || s.since.IsZero() {
		events, err := t.node.Events(ctx, sb.ID, s.seq)
		if err != nil {
			return "?"
		}
		s.since = sb.StateSince
		for _, e := range events {
			s.seq = e.Seq
			if e.Type == types.EventTypeWoke {
				s.wakes++
			}
		}
	}
	return fmt.Sprint(s.wakes)
}

// watch draws on the whole screen until q, Ctrl-C or the end of ctx. A failure
// of the first poll is returned; later ones are shown on the screen.
func (t *top) watch(ctx context.Context, in io.Reader, screen *os.File, interval time.Duration) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	text, err := t.text(ctx, screen)
	if err != nil {
		return err
	}
	if keyboard, ok := in.(*os.File); ok && isTerminal(keyboard) {
		restore, err := term.MakeRaw(int(keyboard.Fd()))
		if err != nil {
			return err
		}
		defer term.Restore(int(keyboard.Fd()), restore)
		go endOnKey(keyboard, cancel) // ends with the program
	}
	resized := make(chan os.Signal, 1)
	notifyResized(resized)
	defer signal.Stop(resized)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	fmt.Fprint(screen, "\x1b[?1049h\x1b[?25l") // another screen, no cursor
	defer fmt.Fprint(screen, "\x1b[?25h\x1b[?1049l")
	for {
		if _, err := screen.Write(frame(text, screen)); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-resized:
		}
		if text, err = t.text(ctx, screen); ctx.Err() != nil {
			return nil
		} else if err != nil {
			text = []byte(clean(err.Error()) + "\n")
		}
	}
}

// pollTimeout limits how long a node that hangs delays the screen.
const pollTimeout = 10 * time.Second

// text polls the node and returns the table, with as many sandboxes as the screen has room
// for.
func (t *top) text(ctx context.Context, screen *os.File) ([]byte, error) {
	const otherLines = 5 // all but sandboxes
	ctx, cancel := context.WithTimeout(ctx, pollTimeout)
	defer cancel()
	got, err := t.poll(ctx)
	var text bytes.Buffer
	if err == nil {
		_, height := sizeOf(screen)
		err = t.draw(ctx, &text, got, max(1, height-otherLines))
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("the node did not respond within %s", pollTimeout)
	}
	return text.Bytes(), err
}

// frame draws a text over the screen's. It cuts text that does not fit: a line that the
// terminal wraps would push others out.
func frame(text []byte, screen *os.File) []byte {
	width, height := sizeOf(screen)
	var out bytes.Buffer
	out.WriteString("\x1b[H")
	lines := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	for i, line := range lines[:min(len(lines), height)] {
		if i > 0 {
			out.WriteString("\r\n") // raw terminals do not return the carriage by themselves
		}
		// The last column stays free: what comes after it depends on the terminal.
		out.WriteString(cutTo(line, width-1) + "\x1b[K")
	}
	out.WriteString("\x1b[J")
	return out.Bytes()
}

// endOnKey waits for q or Ctrl-C, which a raw terminal sends as a character.
func endOnKey(keyboard io.Reader, end func()) {
	key := make([]byte, 1)
	for {
		if _, err := keyboard.Read(key); err != nil {
			return
		}
		if key[0] == 'q' || key[0] == ctrlC {
			end()
			return
		}
	}
}
