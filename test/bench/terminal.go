package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/prometheus/procfs"
	"golang.org/x/sync/errgroup"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/testkit/testpty"
)

const (
	keystrokes  = 400                  // in each round
	keyPause    = 2 * time.Millisecond // between two of them
	catBytes    = 100_000_000
	catRounds   = 3
	catPath     = "/srv/text"
	guestGrowth = 2 // MiB
	terminals   = 100
	outputLines = 100_000 // of each terminal
)

// Commands of terminals. They print begun when they are ready.
const (
	echoCommand   = "stty raw -echo; echo begun; exec cat"
	catCommand    = "stty -echo -onlcr; echo begun; read x; cat %s"
	numberCommand = "stty -echo -onlcr; echo begun; read x; seq -f '%%019.0f' %d" // 20 bytes a line
)

// measureTerminal measures terminals through the API, against pseudoterminals of this machine.
func measureTerminal(ctx context.Context, b *bench) ([]row, error) {
	keys, err := measureKeystrokes(ctx, b)
	if err != nil {
		return nil, err
	}
	output, err := measureCat(ctx, b)
	return []row{keys, output}, err
}

// console is a terminal as its person uses it.
type console interface {
	io.WriteCloser
	// read returns the next output, and io.EOF once the program has ended.
	read() ([]byte, error)
}

// remote is a terminal of a sandbox.
type remote struct{ *client.Terminal }

func (r remote) read() ([]byte, error) {
	for {
		ev, err := r.Next()
		switch {
		case err != nil:
			return nil, err
		case ev.Truncated != nil:
			return nil, errors.New("output is missing")
		case ev.Exit != nil:
			return nil, io.EOF
		case ev.Output != nil:
			return ev.Output, nil
		}
	}
}

// local is a pseudoterminal of this machine.
type local struct {
	*os.File
	cmd *exec.Cmd
	buf []byte
}

// read takes any error for the end of the program: it is EIO.
func (l *local) read() ([]byte, error) {
	n, err := l.File.Read(l.buf)
	if err != nil {
		err = io.EOF
	}
	return l.buf[:n], err
}

func (l *local) Close() error {
	err := l.File.Close() // hangs up
	return errors.Join(err, endedBySignal(l.cmd.Wait()))
}

// endedBySignal returns nil for the error of a program that exited or was ended by a signal.
func endedBySignal(err error) error {
	if _, ok := errors.AsType[*exec.ExitError](err); ok {
		return nil
	}
	return err
}

// openRemote opens a terminal in the sandbox, and returns once it is ready.
func (b *bench) openRemote(ctx context.Context, command string) (console, error) {
	term, err := b.node.API.OpenTerminal(ctx, b.id, client.TerminalOptions{Command: command})
	if err != nil {
		return nil, err
	}
	return awaitBegun(remote{term})
}

// openLocal is openRemote on this machine.
func (b *bench) openLocal(_ context.Context, command string) (console, error) {
	person, program, err := testpty.Open(80, 24)
	if err != nil {
		return nil, err
	}
	defer program.Close()
	l := &local{File: person, cmd: exec.Command("sh", "-c", command), buf: make([]byte, 64<<10)}
	if err := testpty.Start(l.cmd, program); err != nil {
		person.Close()
		return nil, err
	}
	return awaitBegun(l)
}

func awaitBegun(c console) (console, error) {
	var seen []byte
	for !bytes.Contains(seen, []byte("begun")) || seen[len(seen)-1] != '\n' {
		out, err := c.read()
		if err != nil {
			c.Close()
			return nil, fmt.Errorf("the terminal ended after %q: %w", seen, err)
		}
		seen = append(seen, out...)
	}
	return c, nil
}

type openConsole func(ctx context.Context, command string) (console, error)

// measureKeystrokes measures from the press of a key until its echo by a program in raw mode.
func measureKeystrokes(ctx context.Context, b *bench) (row, error) {
	typing := func(name string, open openConsole) *contender {
		return newMedians(name, func(ctx context.Context) (spread, error) {
			c, err := open(ctx, echoCommand)
			if err != nil {
				return nil, err
			}
			defer c.Close()
			key := []byte("x")
			return repeat(ctx, b.count(keystrokes), func() error { return pause(ctx, keyPause) }, func() error {
				if _, err := c.Write(key); err != nil {
					return err
				}
				out, err := c.read()
				if err == nil && !bytes.Equal(out, key) {
					err = fmt.Errorf("the echo is %q", out)
				}
				return err
			})
		})
	}
	ours, peer := typing("doze", b.openRemote), typing("a local pseudoterminal", b.openLocal)
	if err := versus(ctx, latencyRounds, ours, peer); err != nil {
		return row{}, err
	}
	r := timesRow("keystroke to echo through a terminal (WebSocket, TLS)", "p50 ≤ 2 ms, p99 ≤ 10 ms", timesBars{2, 10}, ours.spread(), ours.samples)
	theirs := peer.spread()
	r.Values.add("local_p50_ms", theirs)["local_p99_ms"] = peer.samples.p99()
	r.Note = fmt.Sprintf("%s: p50 %.3f ms, p99 %.2f ms", peer.name, theirs.median(), peer.samples.p99())
	return r, nil
}

// drainConsole starts the output of a program and reads all of it.
func drainConsole(c console, size int64) error {
	if _, err := io.WriteString(c, "\r"); err != nil {
		return err
	}
	read := int64(0)
	for {
		out, err := c.read()
		read += int64(len(out))
		switch {
		case err == io.EOF && read != size:
			return fmt.Errorf("read %d bytes of %d", read, size)
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
	}
}

// measureCat measures cat of a text in a terminal, and the growth of the guest meanwhile.
func measureCat(ctx context.Context, b *bench) (row, error) {
	size := int64(b.count(catBytes))
	if err := b.node.exec(ctx, b.id, "sh", "-c", fmt.Sprintf("yes 'the quick brown fox jumps over the lazy dog' | head -c %d >%s", size, catPath)); err != nil {
		return row{}, err
	}
	localPath := filepath.Join(b.node.Home, "text")
	text := bytes.Repeat([]byte("the quick brown fox jumps over the lazy dog\n"), int(size)/44+1)[:size]
	if err := os.WriteFile(localPath, text, 0o600); err != nil {
		return row{}, err
	}
	defer os.Remove(localPath)
	reading := func(name, path string, open openConsole) *contender {
		return &contender{name: name, round: func(ctx context.Context) (float64, error) {
			c, err := open(ctx, fmt.Sprintf(catCommand, path))
			if err != nil {
				return 0, err
			}
			defer c.Close()
			took, err := timed(func() error { return drainConsole(c, size) })
			return float64(size) / 1e3 / took, err
		}}
	}
	ours, peer := reading("doze", catPath, b.openRemote), reading("a local pseudoterminal", localPath, b.openLocal)
	guest, err := b.guest()
	if err != nil {
		return row{}, err
	}
	before, err := guest.NewStatus()
	if err != nil {
		return row{}, err
	}
	if err := versus(ctx, catRounds, ours, peer); err != nil {
		return row{}, err
	}
	after, err := guest.NewStatus()
	if err != nil {
		return row{}, err
	}
	growth := (float64(after.VmHWM) - float64(before.VmRSS)) / (1 << 20)
	mine, theirs := ours.spread(), peer.spread()
	return row{
		Figure:   "`cat` of 100 MB in a terminal, to the client (WebSocket, TLS); growth of the guest's memory (RSS)",
		Bar:      fmt.Sprintf("≥ 50 MB/s; ≤ %d MiB", guestGrowth),
		Measured: fmt.Sprintf("%s MB/s; %.1f MiB", mine.text("%.0f"), growth),
		Met:      mine.median() >= 50 && growth <= guestGrowth,
		Values:   values{"guest_growth_mib": growth}.add("mb_per_s", mine).add("local_mb_per_s", theirs),
		Note:     fmt.Sprintf("%s: %s MB/s", peer.name, theirs.text("%.0f")),
	}, nil
}

// guest is the first process of the sandbox.
func (b *bench) guest() (procfs.Proc, error) {
	all, err := procfs.AllProcs()
	if err != nil {
		return procfs.Proc{}, err
	}
	i := slices.IndexFunc(all, func(p procfs.Proc) bool {
		name, _ := p.Comm()
		return name == "doze-guest" && belongs(p, b.node.Home, []string{b.id})
	})
	if i < 0 {
		return procfs.Proc{}, errors.New("no guest is among the processes")
	}
	return all[i], nil
}

// measureTerminals has many terminals print at the same time. Its node has transferred nothing before, so that all
// memory that terminals need is growth.
func measureTerminals(ctx context.Context, b *bench) ([]row, error) {
	lines := b.count(outputLines)
	before, err := b.node.rss()
	if err != nil {
		return nil, err
	}
	watch := watchRSS(ctx, b.node)
	printing := func() (rate float64, err error) {
		consoles := make([]console, terminals)
		defer func() {
			for _, c := range consoles {
				if c != nil {
					c.Close()
				}
			}
		}()
		if err := concurrently(ctx, terminals, func(_ context.Context, i int) (err error) {
			consoles[i], err = b.openRemote(ctx, fmt.Sprintf(numberCommand, lines))
			return err
		}); err != nil {
			return 0, err
		}
		took, err := timed(func() error {
			var all errgroup.Group
			for _, c := range consoles {
				all.Go(func() error { return drainConsole(c, int64(lines)*20) })
			}
			return all.Wait()
		})
		return float64(terminals*lines*20) / 1e3 / took, err
	}
	rate, err := printing()
	seen, failed := watch()
	if err = errors.Join(err, failed); err != nil {
		return nil, err
	}
	each := (seen.max() - float64(before)) / 1e6 / terminals
	return []row{{
		Figure:   fmt.Sprintf("%d terminals that print %.1f MB each at the same time; memory of the node (RSS) for each", terminals, float64(lines)*20/1e6),
		Bar:      "no loss; ≤ 1 MB",
		Measured: fmt.Sprintf("no loss; %.2f MB (%.0f MB/s)", each, rate),
		Met:      each <= 1, // with a loss it fails
		Values:   values{"mb_each": each, "mb_per_s": rate},
	}}, nil
}
