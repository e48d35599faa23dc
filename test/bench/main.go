// Bench measures a node and its peers on this machine, and prints a
// table. `make bench` runs it as the node's user, by packaging/host/enter, with
// everything that it needs built. `make soak` has it work on a node for a long time.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// row is one line of the table.
type row struct {
	Figure   string `json:"figure"`
	Bar      string `json:"bar"`
	Measured string `json:"measured"`
	Met      bool   `json:"met"`    // true without a bar
	Values   values `json:"values"` // the figures in Measured, with the unit in the name
	Note     string `json:"note,omitempty"`
}

// noBar is the bar of a row that is for comparison.
const noBar = "–"

// values collects the values of a row.
type values map[string]float64

// add adds the median of the rounds as name, and the least and the greatest as
// name_min and name_max.
func (v values) add(name string, s spread) values {
	v[name], v[name+"_min"], v[name+"_max"] = s.median(), s.min(), s.max()
	return v
}

// atMost is the row of a figure whose median has an upper bar. The unit begins with a space,
// unless it is empty.
func atMost(figure, verb, unit string, bar float64, name string, s spread) row {
	return row{
		Figure:   figure,
		Bar:      fmt.Sprintf("≤ %g%s", bar, unit),
		Measured: s.text(verb) + unit,
		Met:      s.median() <= bar,
		Values:   values{}.add(name, s),
	}
}

// figures in the order of the table. Each measures on a node of its own, and first makes a
// sandbox there unless it makes its own ones.
var figures = []struct {
	name    string
	start   func(bin string) (*node, error)
	sandbox func(b *bench, ctx context.Context, name string) error // or nil
	measure func(context.Context, *bench) ([]row, error)
}{
	{"wake", startNode, (*bench).withServer, measureWake},
	{"thaw", startNode, (*bench).withNothing, measureThaw},
	{"create", startNode, nil, measureCreate},
	{"cold", startNode, (*bench).withServer, measureColdWake},
	{"exec", startNode, (*bench).withNothing, measureExec},
	{"session", startNode, (*bench).withNothing, measureSession},
	{"contexts", startNode, nil, measureContexts},
	{"output", startNode, (*bench).withNothing, measureOutput},
	{"terminal", startNode, (*bench).withNothing, measureTerminal},
	{"terminals", startNode, (*bench).withNothing, measureTerminals},
	{"watch", startNode, (*bench).withProgram, measureWatch},
	{"ready", startNode, (*bench).withProgram, measureReady},
	{"files", startNode, (*bench).withNothing, measureFiles},
	{"snapshot", startNode, nil, measureSnapshot},
	{"backup", startBackupNode, nil, measureBackup},
	{"bucket", startBucketNode, nil, measureBucket},
	{"throughput", startNode, (*bench).withServer, measureThroughput},
	{"asleep", startNode, nil, measureAsleep},
	{"start", startNode, nil, measureStart},
	{"fleet", startNode, nil, measureFleet},
	{"stream", startEgressNode, (*bench).withProgram, measureStream},
	{"intercept", startEgressNode, (*bench).withProgram, measureIntercept},
	{"added", startEgressNode, (*bench).withProgram, measureAdded},
	{"policy", startEgressNode, nil, measurePolicy},
	{"first", startEgressNode, (*bench).withProgram, measureFirst},
	{"blob", startEgressNode, (*bench).withProgram, measureBlob},
	{"replace", startEgressNode, (*bench).withProgram, measureReplace},
}

// bench is what the figures share.
type bench struct {
	node     *node
	id       string // of the sandbox of the figure
	url      string // of its preview, if it has a server
	quick    bool
	fleet    int // sandboxes of the figure of that name
	progress func(format string, args ...any)
}

func (b *bench) withNothing(ctx context.Context, name string) (err error) {
	b.id, err = b.node.create(ctx, name, 0)
	return err
}

func (b *bench) withProgram(ctx context.Context, name string) (err error) {
	b.id, err = b.node.withProgram(ctx, name)
	return err
}

func (b *bench) withServer(ctx context.Context, name string) (err error) {
	b.id, b.url, err = b.node.withServer(ctx, name)
	return err
}

// count is n, or a small part of it in a quick run.
func (b *bench) count(n int) int {
	if b.quick {
		return max(n/20, 2)
	}
	return n
}

// lasting is d, or a small part of it in a quick run.
func (b *bench) lasting(d time.Duration) time.Duration {
	if b.quick {
		return d / 10
	}
	return d
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	switch arguments := os.Args[1:]; {
	case len(arguments) == 2 && arguments[0] == "serve":
		stop() // SIGTERM ends it: else a stop of its sandbox takes as long as it may
		err = serve(arguments[1])
	case len(arguments) == 2 && arguments[0] == "listen":
		stop()
		err = serveLate(arguments[1])
	case len(arguments) == 1 && arguments[0] == "origin":
		err = serveOrigin()
	case len(arguments) == 5 && arguments[0] == "floor":
		err = serveFloor(arguments[1], arguments[2], arguments[3], arguments[4])
	case len(arguments) == 2 && arguments[0] == "client":
		err = runClient(ctx, arguments[1])
	case len(arguments) > 0 && arguments[0] == "soak":
		err = runSoak(ctx, arguments[1:])
	default:
		err = run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	bin := flag.String("bin", cmp.Or(os.Getenv("DOZE_BIN"), "bin"), "folder of doze's programs and of this one")
	out := flag.String("json", "build/bench.json", "file that gets the figures as JSON")
	only := flag.String("only", "", "measure these figures alone, separated by commas")
	quick := flag.Bool("quick", false, "few repetitions: shows that the figures can be measured, not what they are")
	fleet := flag.Int("fleet", 500, "sandboxes of the figure fleet")
	flag.Parse()

	b := &bench{quick: *quick, fleet: *fleet, progress: func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }}
	if cgroup() == "" {
		return errors.New("there is no DOZE_CGROUP: start it by packaging/host/enter, as `make bench` does")
	}
	programs, err := filepath.Abs(*bin)
	if err != nil {
		return err
	}
	var rows []row
	var errs []error
	for _, f := range figures {
		if *only != "" && !slices.Contains(strings.Split(*only, ","), f.name) {
			continue
		}
		if ctx.Err() != nil {
			break
		}
		b.progress("measuring %s…", f.name)
		var measured []row
		b.node, err = f.start(programs)
		if err == nil && f.sandbox != nil {
			err = f.sandbox(b, ctx, f.name)
		}
		if err == nil {
			measured, err = f.measure(ctx, b)
		}
		if b.node != nil {
			err = errors.Join(err, b.node.remove())
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("measure %s: %w", f.name, err))
		}
		rows = append(rows, measured...)
	}
	print(rows) // also what there is after a failure
	return errors.Join(append(errs, write(*out, rows))...)
}

func print(rows []row) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "figure\tbar\tmeasured\tmet")
	for _, r := range rows {
		met := "yes"
		switch {
		case r.Bar == noBar:
			met = noBar
		case !r.Met:
			met = "NO"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", r.Figure, r.Bar, r.Measured, met)
		if r.Note != "" {
			fmt.Fprintf(w, "  %s\t\t\t\n", r.Note)
		}
	}
	w.Flush()
}

func write(path string, rows []row) error {
	report := struct {
		At    time.Time `json:"at"`
		CPUs  int       `json:"cpus"`
		Linux string    `json:"linux"`
		Rows  []row     `json:"rows"`
	}{time.Now().UTC(), runtime.NumCPU(), kernel(), rows}
	text, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(text, '\n'), 0o644)
}

func kernel() string {
	var u unix.Utsname
	_ = unix.Uname(&u) // never fails
	return unix.ByteSliceToString(u.Release[:])
}

// poll calls done every interval until it returns true or an error, and returns the
// context's cause when that ends first.
func poll(ctx context.Context, interval time.Duration, done func() (bool, error)) error {
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		if err := pause(ctx, interval); err != nil {
			return err
		}
	}
}

// pause waits unless the context ends first, and then returns its cause.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
