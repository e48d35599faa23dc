package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
)

const (
	// soakWarm is how long a node works before its resources are counted: what it
	// keeps on purpose, such as pools and caches, it has then.
	soakWarm = 30 * time.Second
	// soakSettle bounds the wait until the resources are back, for connections that
	// are kept for a while (30 s) and instances of policies (1 min).
	soakSettle = 5 * time.Minute
	// The allowance beyond the count at the beginning: operations that happen to be in
	// way, such as a sign of life of Podman's service.
	soakSlack  = 10
	soakGrowth = 64 << 20 // of memory
)

// runSoak works on a node for a long time and returns an error for each call that
// failed, and for what the node has not released at the end.
func runSoak(ctx context.Context, arguments []string) error {
	f := flag.NewFlagSet("soak", flag.ContinueOnError)
	bin := f.String("bin", "bin", "folder of doze's programs and of this one")
	duration := f.Duration("duration", 15*time.Minute, "how long to work")
	count := f.Int("sandboxes", 20, "how many exist at a time")
	if err := f.Parse(arguments); err != nil {
		return err
	}
	programs, err := filepath.Abs(*bin)
	if err != nil {
		return err
	}
	n, err := startEgressNode(programs)
	if err == nil {
		s := &soak{node: n}
		err = errors.Join(s.checkFull(ctx), s.run(ctx, *count, *duration))
		fmt.Printf("%d operations, %d failed\n", s.done.Load(), s.failed.Load())
	}
	if n != nil {
		err = errors.Join(err, n.remove())
	}
	return err
}

type soak struct {
	node         *node
	done, failed atomic.Int64
	rounds       int
}

// fullPrograms are commands for the image full, and texts that they print.
var fullPrograms = map[string]string{
	"go version": "go1.",
	`mkdir -p /tmp/go && cd /tmp/go && printf 'package main\nfunc main() { println(6 * 7) }\n' >main.go && gofmt -l . && go run main.go 2>&1`: "42\n",
	`cd /tmp && echo 'fn main() { println!("{}", 6 * 7); }' >main.rs && rustfmt --check main.rs && rustc main.rs && ./main`:                   "42\n",
	`cd /tmp && cargo new --quiet --vcs none crate && cd crate && cargo run --quiet --offline`:                                                "Hello, world!\n",
	`python3 -c 'import ipykernel, matplotlib, pandas; print(pandas.Series([3, 4]).sum())'`:                                                   "7\n",
	`cd /tmp && echo 'const x: number = 6; console.log(x * 7)' >a.ts && tsc a.ts && node a.js && deno run a.ts`:                               "42\n42\n",
}

// checkFull executes the programs of the image full. The tests do not build it, because that takes
// longer than the images of all tests.
func (s *soak) checkFull(ctx context.Context) error {
	sb, _, err := s.node.API.Create(ctx, types.CreateSandboxRequest{Name: "full", Image: "full"})
	if err != nil {
		return err
	}
	var errs []error
	for command, want := range fullPrograms {
		result, err := s.node.API.Exec(ctx, sb.ID, client.ExecRequest{Command: types.Command{Command: command}})
		if err == nil && (result.ExitCode != 0 || !strings.Contains(result.Stdout, want)) {
			err = fmt.Errorf("exit code %d, output %q %q, want %q", result.ExitCode, result.Stdout, result.Stderr, want)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("image full: %s: %w", command, err))
		}
	}
	return errors.Join(append(errs, s.node.API.Delete(ctx, sb.ID))...)
}

// held is what a node has of the machine.
type held struct {
	goroutines, descriptors, cgroups, processes int
	rss                                         int64
}

func (h held) String() string {
	return fmt.Sprintf("%d goroutines, %d descriptors, %d cgroups, %d processes, %d MiB", h.goroutines, h.descriptors, h.cgroups, h.processes, h.rss>>20)
}

// over describes what h has in excess of before; empty if nothing.
func (h held) over(before held) string {
	var over []string
	for _, d := range []struct {
		what          string
		have, allowed int
	}{
		{"goroutines", h.goroutines, before.goroutines + soakSlack},
		{"descriptors", h.descriptors, before.descriptors + soakSlack},
		{"cgroups", h.cgroups, before.cgroups},
		{"processes", h.processes, before.processes},
		{"bytes of memory", int(h.rss), int(before.rss) + soakGrowth},
	} {
		if d.have > d.allowed {
			over = append(over, fmt.Sprintf("%d %s, at most %d expected", d.have, d.what, d.allowed))
		}
	}
	return strings.Join(over, "; ")
}

func (s *soak) run(ctx context.Context, count int, duration time.Duration) error {
	if err := s.work(ctx, count, min(soakWarm, duration)); err != nil {
		return err
	}
	before, err := s.settle(ctx, nil)
	if err != nil {
		return err
	}
	fmt.Println("after the beginning:", before)
	if err := s.work(ctx, count, duration); err != nil {
		return err
	}
	after, err := s.settle(ctx, &before)
	fmt.Println("at the end:", after)
	return err
}

// held counts what the node has.
func (s *soak) held(ctx context.Context) (h held, err error) {
	if h.goroutines, err = goroutines(ctx, s.node.Node); err != nil {
		return h, err
	}
	descriptors, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.node.PID()))
	if err != nil {
		return h, err
	}
	h.descriptors = len(descriptors)
	cgroups, err := filepath.Glob(filepath.Join(cgroup(), "sandboxes", "*", "cgroup.procs"))
	if err != nil {
		return h, err
	}
	h.cgroups = len(cgroups)
	all, err := readCensus(s.node.Home, nil)
	if err != nil {
		return h, err
	}
	h.processes = all.processes
	h.rss, err = s.node.rss()
	return h, err
}

// settle counts what the node has with no sandbox, once it has not less than a few
// seconds before, or not more than before.
func (s *soak) settle(ctx context.Context, before *held) (held, error) {
	ctx, cancel := context.WithTimeout(ctx, soakSettle)
	defer cancel()
	var h held
	err := poll(ctx, 5*time.Second, func() (_ bool, err error) {
		last := h
		if h, err = s.held(ctx); err != nil || before != nil {
			return err == nil && h.over(*before) == "", err
		}
		return h.goroutines >= last.goroutines && last.goroutines > 0, nil
	})
	switch {
	case err != nil && before != nil:
		err = fmt.Errorf("the node has not released %s: %w", h.over(*before), err)
	case err != nil:
		err = fmt.Errorf("the node's resources still shrink, to %s: %w", h, err)
	}
	return h, err
}

// work makes sandboxes, does to each of them whatever comes for the time, and
// destroys them.
func (s *soak) work(ctx context.Context, count int, duration time.Duration) error {
	s.rounds++
	boxes := make([]*soakBox, count)
	err := concurrently(ctx, count, func(ctx context.Context, i int) (err error) {
		boxes[i], err = s.newBox(ctx, fmt.Sprintf("soak-%d-%d", s.rounds, i))
		return err
	})
	if err != nil {
		return err
	}
	var errs []error
	var mu sync.Mutex
	var all sync.WaitGroup
	end := time.Now().Add(duration)
	for _, b := range boxes {
		all.Go(func() {
			for time.Now().Before(end) && ctx.Err() == nil {
				op := soakOperations[rand.IntN(len(soakOperations))]
				s.done.Add(1)
				if err := op.do(ctx, b); err != nil && ctx.Err() == nil {
					s.failed.Add(1)
					mu.Lock()
					if len(errs) < 20 {
						errs = append(errs, fmt.Errorf("%s: %w", op.name, err))
					}
					mu.Unlock()
				}
				_ = pause(ctx, rand.N(2*time.Second)) // else the machine is never idle, and nothing falls asleep
			}
		})
	}
	all.Wait()
	errs = append(errs, concurrently(ctx, count, func(ctx context.Context, i int) error { return s.node.API.Delete(ctx, boxes[i].id) }))
	return errors.Join(errs...)
}

// soakBox is a sandbox with a server. One goroutine uses it.
type soakBox struct {
	node    *node
	id, url string
	files   map[string][sha256.Size]byte // by path, what was written
}

func (s *soak) newBox(ctx context.Context, name string) (*soakBox, error) {
	id, url, err := s.node.withServer(ctx, name)
	if err != nil {
		return nil, err
	}
	_, err = s.node.API.Update(ctx, id, types.UpdateSandboxRequest{SleepAfter: new(types.Duration(time.Second))}) // asleep between operations
	return &soakBox{node: s.node, id: id, url: url, files: map[string][sha256.Size]byte{}}, err
}

var soakOperations = []struct {
	name string
	do   func(context.Context, *soakBox) error
}{
	{"exec", func(ctx context.Context, b *soakBox) error {
		return b.node.exec(ctx, b.id, "sh", "-c", "echo $$ & wait")
	}},
	{"preview", func(ctx context.Context, b *soakBox) error { return b.node.get(ctx, b.url) }},
	{"write", soakWrite},
	{"read", soakRead},
	{"egress, intercepted", func(ctx context.Context, b *soakBox) error { return b.load(ctx, interceptedURL) }},
	{"egress, passed through", func(ctx context.Context, b *soakBox) error { return b.load(ctx, passURL) }},
	{"process", soakProcess},
	{"sleep", func(ctx context.Context, b *soakBox) error { _, err := b.node.API.Sleep(ctx, b.id); return err }},
	{"stop", func(ctx context.Context, b *soakBox) error { _, err := b.node.API.Stop(ctx, b.id); return err }},
	{"list", func(ctx context.Context, b *soakBox) error {
		_, err := b.node.API.List(ctx, client.Filter{})
		return err
	}},
	{"events", func(ctx context.Context, b *soakBox) error {
		_, err := b.node.API.Events(ctx, b.id, 0)
		return err
	}},
}

func soakWrite(ctx context.Context, b *soakBox) error {
	path := fmt.Sprintf("/srv/soak-%d", rand.IntN(20))
	content := bytes.Repeat([]byte{byte(rand.IntN(256))}, rand.IntN(1<<20))
	_, err := b.node.API.WriteFile(ctx, b.id, path, 0o644, bytes.NewReader(content))
	if err == nil {
		b.files[path] = sha256.Sum256(content)
	}
	return err
}

// soakRead checks one of the files that were written.
func soakRead(ctx context.Context, b *soakBox) error {
	for path, want := range b.files {
		result, err := b.node.API.Exec(ctx, b.id, client.ExecRequest{Command: types.Command{Argv: []string{"sha256sum", path}}})
		if err == nil && !strings.HasPrefix(result.Stdout, hex.EncodeToString(want[:])) {
			err = fmt.Errorf("%s is not what was written: %+v", path, result)
		}
		return err
	}
	return nil
}

// soakProcess starts a process and ends it.
func soakProcess(ctx context.Context, b *soakBox) error {
	p, err := b.node.API.StartProcess(ctx, b.id, types.StartProcessRequest{Command: types.Command{Argv: []string{"sleep", "1000"}}})
	if err != nil {
		return err
	}
	_, err = b.node.API.StopProcess(ctx, b.id, p.ID, "")
	return err
}

// load makes requests for a moment.
func (b *soakBox) load(ctx context.Context, url string) error {
	_, err := perSecond(b.node.client(ctx, b.id, task{Do: "load", Connections: 4, Duration: 200 * time.Millisecond, To: url}))
	return err
}
