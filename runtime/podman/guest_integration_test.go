//go:build integration

package podman

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// box is a running sandbox with the real guest.
type box struct {
	t      testing.TB
	n      *node
	spec   sandbox.ContainerSpec
	limits sandbox.Limits
	sandbox.Container
	guest *guest.Client
}

// boot starts a sandbox of an image and waits for its guest.
func (n *node) boot(t testing.TB, image string) *box {
	t.Helper()
	return n.bootWithin(t, image, limits)
}

func (n *node) bootWithin(t testing.TB, image string, limits sandbox.Limits) *box {
	t.Helper()
	spec := n.spec(t, sandbox.NewID())
	spec.GuestBinary = guestBinary(t)
	spec.ImageRef = image
	spec.Env = map[string]string{"DOZE_TEST": "as asked"}
	b := &box{t: t, n: n, spec: spec, limits: limits, guest: guest.NewClient(filepath.Join(spec.RunDir, guest.SocketName))}
	t.Cleanup(func() {
		b.guest.Close()
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
		defer cancel()
		if err := n.Remove(ctx, spec.ID); err != nil {
			t.Error(err)
		}
	})
	ctx := testkit.Context(t)
	if err := n.EnsureImage(ctx, image, nil); err != nil {
		t.Fatalf("%v: run images/build and images/build-test", err)
	}
	if err := n.Create(ctx, spec); err != nil {
		t.Fatal(err)
	}
	b.start()
	return b
}

// start starts the container, or starts it again, and waits for its guest.
func (b *box) start() {
	b.t.Helper()
	c, err := b.n.Start(testkit.Context(b.t), b.spec.ID, b.limits)
	if err != nil {
		b.t.Fatal(err)
	}
	b.Container = c
	b.ready()
}

func (b *box) ready() {
	b.t.Helper()
	var last error
	testkit.Eventually(b.t, "the guest responds", func() bool {
		_, last = b.guest.Hello(b.t.Context())
		return last == nil
	}, func() string { return fmt.Sprint(last) })
}

// try runs a command in the sandbox's shell.
func (b *box) try(command string) (output string, code int) {
	b.t.Helper()
	return b.exec(guest.ExecRequest{Command: guest.Command{Command: command}, Timeout: commandTimeout})
}

func (b *box) exec(req guest.ExecRequest) (output string, code int) {
	b.t.Helper()
	stream, err := b.guest.Exec(testkit.Context(b.t), req)
	if err != nil {
		b.t.Fatalf("exec %+v: %v", req, err)
	}
	defer stream.Close()
	var out strings.Builder
	code = -1
	for {
		event, err := stream.Next()
		if errors.Is(err, io.EOF) {
			return strings.TrimSpace(out.String()), code
		}
		if err != nil {
			b.t.Fatalf("exec %+v: %v", req, err)
		}
		switch event.Kind {
		case guest.FrameStdout, guest.FrameStderr:
			out.Write(event.Data)
		case guest.FrameComplete:
			code = event.Result.ExitCode
		}
	}
}

// must returns the output of a command that has to succeed.
func (b *box) must(command string) string {
	b.t.Helper()
	out, code := b.try(command)
	if code != 0 {
		b.t.Fatalf("%s: code %d: %s", command, code, out)
	}
	return out
}

// mustNot runs a command that has to fail.
func (b *box) mustNot(command string) {
	b.t.Helper()
	if out, code := b.try(command); code == 0 {
		b.t.Errorf("%s: succeeded: %s", command, out)
	}
}
