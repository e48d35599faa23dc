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
		Long:  "Watch sandboxes with their CPU use since the last reading and their memory. This wakes none of them. q or Ctrl-C ends it.",
		Args:  wants(0, 0),
		RunE: a.withNode(func(ctx context.Context, node *client.Client, _ []string) error {
			if interval < 100*time.Millisecond {
				return usage.Errorf("--interval %s is too short; use at least 100ms", interval)
			}
			t := newTop(node)
			screen, ok := a.out.(*os.File)
			if once || a.json || !ok || !isTerminal(screen) {
				return t.once(ctx, a)
			}
			return t.watch(ctx, a.in, screen, interval)
		}),
	}
	cmd.Flags().BoolVar(&once, "once", false, "print the table once and end")
	cmd.Flags().DurationVar(&interval, "interval", 2*time.Second, "time between two looks")
	return cmd
}

// top is a table of sandboxes that is read again and again.
type top struct {
	node  *client.Client
	wakes map[string]*wakeCount // by id
	cpu   map[string]cpuSample  // by id, at the last reading
}

func newTop(node *client.Client) *top {
	return &top{node: node, wakes: map[string]*wakeCount{}, cpu: map[string]cpuSample{}}
}

// cpuSample is the CPU time of a sandbox at a moment, and the share of a core that
// it used until then; less than 0 when that is not known.
type cpuSample struct {
	at      time.Time
	seconds float64
	share   float64
}

// sampleCPU notes the CPU time of the sandboxes of one reading.
func (t *top) sampleCPU(sandboxes []types.Sandbox) {
	now, next := time.Now(), make(map[string]cpuSample, len(sandboxes))
	for _, sb := range sandboxes {
		if sb.Usage == nil {
			continue
		}
		sample := cpuSample{at: now, seconds: sb.Usage.CPUSeconds, share: -1}
		if before, ok := t.cpu[sb.ID]; ok && sample.seconds >= before.seconds && now.After(before.at) {
			sample.share = (sample.seconds - before.seconds) / now.Sub(before.at).Seconds()
		}
		next[sb.ID] = sample
	}
	t.cpu = next
}

// usage is what the table says of a sandbox's CPU and memory.
func (t *top) usage(sb types.Sandbox) (cpu, memory string) {
	cpu, memory = "-", "-"
	if sb.Usage == nil {
		return cpu, memory
	}
	if share := t.cpu[sb.ID].share; share >= 0 {
		cpu = fmt.Sprintf("%.1f%%", share*100)
	}
	if sb.Usage.MemoryBytes > 0 {
		memory = size(sb.Usage.MemoryBytes)
	}
	return cpu, memory
}

// wakeCount counts the wakes of one sandbox, by reading only what is new in its
// timeline, and that only when its state has changed.
type wakeCount struct {
	since time.Time // state_since at the last look
	seq   uint64    // of the last event that was read
	count int
}

// snapshot is one look.
type snapshot struct {
	Node      types.Node      `json:"node"`
	Sandboxes []types.Sandbox `json:"sandboxes"`
}

func (t *top) poll(ctx context.Context) (snapshot, error) {
	node, err := t.node.Node(ctx)
	if err != nil {
		return snapshot{}, err
	}
	sandboxes, err := t.node.List(ctx, client.Filter{Usage: true})
	if err != nil {
		return snapshot{}, err
	}
	t.sampleCPU(sandboxes)
	slices.SortStableFunc(sandboxes, func(x, y types.Sandbox) int {
		return cmp.Or(rank(x.State)-rank(y.State), y.LastActiveAt.Compare(x.LastActiveAt))
	})
	return snapshot{node, sandboxes}, nil
}

// rank puts what uses most above.
func rank(state types.State) int {
	// The index of unknown states is -1: they rank last.
	order := []types.State{types.StateStopped, types.StateAsleep, types.StateStarting, types.StateRunning}
	return -slices.Index(order, state)
}

func (t *top) once(ctx context.Context, a *app) error {
	snap, err := t.poll(ctx)
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(snap)
	}
	return t.draw(ctx, a.out, snap, len(snap.Sandboxes))
}

// draw writes the table with at most that many sandboxes.
func (t *top) draw(ctx context.Context, w io.Writer, snap snapshot, rows int) error {
	engine := "engine ok"
	if !snap.Node.Engine.OK {
		engine = "engine: " + snap.Node.Engine.Error
	}
	var counts []string
	for _, state := range states {
		if n := snap.Node.Sandboxes[types.State(state)]; n > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", n, state))
		}
	}
	fmt.Fprintln(w, clean(fmt.Sprintf("node %s, up %s, %s. In use: %d, waiting: %d. %s", snap.Node.ID, ago(snap.Node.StartedAt), engine,
		snap.Node.Leases, snap.Node.Waiters, cmp.Or(strings.Join(counts, ", "), "-"))))
	fmt.Fprintln(w)
	table := newTable(w, "NAME", "STATE", "FOR", "CPU", "MEMORY", "WAKES", "ACTIVE", "PORTS", "SIZE", "IMAGE")
	for _, sb := range snap.Sandboxes[:min(rows, len(snap.Sandboxes))] {
		cpu, memory := t.usage(sb)
		ports := cmp.Or(strings.Join(portNumbers(sb.Ports), ","), "-")
		table.row(sb.Name, sb.State, ago(sb.StateSince), cpu, memory, t.countWakes(ctx, sb), ago(sb.LastActiveAt), ports, sb.Size, sb.Image)
	}
	if err := table.flush(); err != nil {
		return err
	}
	if more := len(snap.Sandboxes) - rows; more > 0 {
		fmt.Fprintf(w, "… and %d more\n", more)
	}
	return nil
}

// countWakes is how often a sandbox woke, of what its timeline has kept.
func (t *top) countWakes(ctx context.Context, sb types.Sandbox) string {
	have := t.wakes[sb.ID]
	if have == nil {
		have = &wakeCount{}
		t.wakes[sb.ID] = have
	}
	if !have.since.Equal(sb.StateSince) || have.since.IsZero() {
		events, err := t.node.Events(ctx, sb.ID, have.seq)
		if err != nil {
			return "?"
		}
		have.since = sb.StateSince
		for _, e := range events {
			have.seq = e.Seq
			if e.Type == "woke" {
				have.count++
			}
		}
	}
	return fmt.Sprint(have.count)
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
	snap, err := t.poll(ctx)
	var text bytes.Buffer
	if err == nil {
		_, height := sizeOf(screen)
		err = t.draw(ctx, &text, snap, max(1, height-otherLines))
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
		if key[0] == 'q' || key[0] == 3 {
			end()
			return
		}
	}
}
