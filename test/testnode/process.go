package testnode

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// shownLog is how much of a node's log Log returns.
const shownLog = 64 << 10

// running is one process of a node.
type running struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed when it has ended
}

// ended reports whether the process has ended.
func (r *running) ended() bool {
	select {
	case <-r.exited:
		return true
	default:
		return false
	}
}

func unnamedFile() (*os.File, error) {
	f, err := os.CreateTemp("", "node-log")
	if err != nil {
		return nil, err
	}
	return f, os.Remove(f.Name())
}

// Start starts the node, also after Stop or Kill, and returns when it serves.
func (n *Node) Start() error {
	if n.run != nil {
		return errors.New("the node runs already")
	}
	run, err := n.launch()
	if err != nil {
		return err
	}
	n.run = run
	deadline := time.Now().Add(wait)
	for err = n.responds(); err != nil; err = n.responds() {
		select {
		case <-run.exited:
			n.run = nil
			return fmt.Errorf("the node ended: %s\n%s", run.cmd.ProcessState, n.Log())
		case <-time.After(2 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the node does not serve: %w\n%s", err, n.Log())
		}
	}
	return nil
}

func (n *Node) launch() (*running, error) {
	cmd := n.RunCommand()
	cmd.Stdout, cmd.Stderr = n.log, n.log
	// The signals of a terminal are for the test, and a node ends with its parent.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	run := &running{cmd: cmd, exited: make(chan struct{})}
	started := make(chan error, 1)
	go func() { // ends with the node
		// The kernel sends Pdeathsig when this thread ends, so it must not.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // cmd.ProcessState has the result
			close(run.exited)
		}
	}()
	return run, <-started
}

// Stop ends the node, if it runs, as a service manager does; its sandboxes sleep.
func (n *Node) Stop() error { return n.terminate(syscall.SIGTERM) }

// Kill ends the node, if it runs, as a crash does, and waits until it is gone.
func (n *Node) Kill() error { return n.terminate(syscall.SIGKILL) }

func (n *Node) terminate(signal syscall.Signal) error {
	run := n.run
	if run == nil {
		return nil
	}
	n.run = nil
	if run.ended() {
		return fmt.Errorf("the node had ended by itself: %s", run.cmd.ProcessState)
	}
	// One that ends at this moment is what was wanted.
	if err := run.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-run.exited:
		if n.API != nil {
			n.API.Close() // its connections are dead
		}
		return nil
	case <-time.After(wait):
		err := fmt.Errorf("the node did not end for %s after %s\n%s", wait, signal, n.Log())
		return errors.Join(err, run.cmd.Process.Kill())
	}
}

// Runs reports whether the node runs.
func (n *Node) Runs() bool { return n.run != nil && !n.run.ended() }

// PID of the running node.
func (n *Node) PID() int { return n.run.cmd.Process.Pid }

// Output is the whole output of the node, from its first start on.
func (n *Node) Output() io.Reader { return io.NewSectionReader(n.log, 0, 1<<40) }

// Log is the end of the output, without news of Caddy and of the node.
func (n *Node) Log() string {
	text, err := io.ReadAll(n.Output())
	if err != nil {
		return err.Error()
	}
	var kept strings.Builder
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, `{"level":"info"`) {
			kept.WriteString(line)
		}
	}
	output := kept.String()
	if len(output) > shownLog {
		_, output, _ = strings.Cut(output[len(output)-shownLog:], "\n")
	}
	return output
}
