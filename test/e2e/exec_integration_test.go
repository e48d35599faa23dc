//go:build integration

package e2e

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

//go:embed testdata/exec.py
var execPython []byte

//go:embed testdata/exec.mjs
var execNode []byte

// Programs start commands with a pipe for input that they keep open, and talk to them.
func TestProgramsTalkToCommandsThroughDozeExec(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	for _, tt := range []struct {
		program, name string
		script        []byte
	}{
		{"python3", "exec.py", execPython},
		{"node", "exec.mjs", execNode},
	} {
		t.Run(tt.program, func(t *testing.T) {
			script := filepath.Join(t.TempDir(), tt.name)
			if err := os.WriteFile(script, tt.script, 0o600); err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(testkit.Context(t), tt.program, script, n.Program("doze"), b.id)
			cmd.Env = n.Command().Env
			if out, err := cmd.CombinedOutput(); err != nil || string(out) != "ok\n" {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

// slowly hashes what it is given, and now and then takes none of it for a while.
type slowly struct {
	hash.Hash
	n     int64
	pause func()
}

func (s *slowly) Write(b []byte) (int, error) {
	before := s.n
	s.n += int64(len(b))
	if before>>28 != s.n>>28 { // every 256 MiB
		s.pause()
	}
	return s.Hash.Write(b)
}

func digest(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil)) }

// A GiB of output arrives whole, whatever it consists of, in order, and however
// slowly it is read; the node buffers little of it.
func TestOneGiBOfOutputArrivesWhole(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	for name, command := range map[string]string{
		"zeros": "head -c 1073741824 /dev/zero",
		"text":  "yes 'a line of text, such as logs have' | head -c 1073741824",
	} {
		t.Run(name, func(t *testing.T) {
			want := strings.Fields(b.exec(command + " | sha256sum"))[0]
			got := &slowly{Hash: sha256.New(), pause: func() {
				// Another command runs to its end meanwhile.
				if _, err := n.API.Exec(testkit.Context(t), b.id, client.ExecRequest{Command: types.Command{Argv: []string{"true"}}}); err != nil {
					t.Error(err)
				}
			}}
			n.StaysSmall(t, func() {
				cmd := n.Command("exec", "-n", b.id, "-c", command+"; echo end >&2; exit 4")
				var errs bytes.Buffer
				cmd.Stdout, cmd.Stderr = got, &errs
				var exit *exec.ExitError
				if err := cmd.Run(); !errors.As(err, &exit) || exit.ExitCode() != 4 || errs.String() != "end\n" {
					t.Errorf("%v, %s", err, errs.String())
				}
			})
			if got.n != 1<<30 || digest(got) != want {
				t.Errorf("%d bytes with the digest %s, want %s", got.n, digest(got), want)
			}
		})
	}
}

// A GiB of input does, too.
func TestOneGiBOfInputArrivesWhole(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	want := sha256.New()
	in := io.TeeReader(io.LimitReader(zeros{}, 1<<30), want)
	n.StaysSmall(t, func() {
		cmd := n.Command("exec", b.id, "--", "sha256sum")
		cmd.Stdin = in
		out, err := cmd.Output()
		if err != nil || !strings.HasPrefix(string(out), digest(want)) {
			t.Errorf("%v: %s, want %s", err, out, digest(want))
		}
	})
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// The guest buffers no more than a window for a command that reads nothing, and
// releases it.
func TestUnreadInputIsBounded(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	guest := b.hostPID()
	before := testnode.Memory(t, guest, "VmRSS")
	cmd := n.Command("exec", b.id, "-c", "echo up; exec sleep 1000")
	cmd.Stdin = zeros{}
	out, err := cmd.StdoutPipe()
	b.must(err)
	b.must(cmd.Start())
	up := make([]byte, 3)
	_, err = io.ReadFull(out, up)
	b.must(err)
	testkit.Eventually(t, "the window is full", func() bool { return testnode.Memory(t, guest, "VmRSS") > before+512<<10 })
	if most := testnode.Memory(t, guest, "VmHWM"); most > before+16*mib {
		t.Errorf("the guest had %d bytes", most)
	}
	b.must(cmd.Process.Signal(os.Interrupt))
	out.Close()
	cmd.Process.Wait()
	testkit.Eventually(t, "the command is killed", func() bool { return !strings.Contains(b.exec("cat /proc/[0-9]*/comm 2>/dev/null || true"), "sleep") })
	testkit.Eventually(t, "its guest is small", func() bool { return testnode.Memory(t, guest, "VmRSS") <= mostGuest })
}
