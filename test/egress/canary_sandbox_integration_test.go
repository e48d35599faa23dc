//go:build integration

package egress

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/testkit"
)

// everything passes on what can be read in a sandbox: see the program of that name.
// It comes as a file, and as it is: events, and decompression with the race detector,
// would take ten times as long.
func (n *node) everything(ctx context.Context, id string, look func(io.Reader) error) error {
	const program, output = "/tmp/everything", "/tmp/everything.out"
	f, err := os.Open(filepath.Join(os.Getenv("DOZE_BIN"), "everything"))
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := n.API.WriteFile(ctx, id, program, 0o755, f); err != nil {
		return err
	}
	r, err := n.API.Exec(ctx, id, client.ExecRequest{Command: types.Command{Command: program + " >" + output}})
	if err != nil {
		return err
	}
	if r.ExitCode != 0 {
		return fmt.Errorf("%s: exit code %d, %s", program, r.ExitCode, r.Stderr)
	}
	archive, err := n.API.GetArchive(ctx, id, output)
	if err != nil {
		return err
	}
	defer archive.Close()
	t := tar.NewReader(archive)
	if _, err := t.Next(); err != nil {
		return err
	}
	return look(t)
}

// searchSandbox searches everything readable in a sandbox for secrets, if there is
// one.
func (n *node) searchSandbox(ctx context.Context, id string) error {
	if !n.Runs() {
		return nil
	}
	if _, err := n.API.Get(ctx, id); problem.Has(err, problem.SandboxNotFound) {
		return nil
	}
	return n.everything(ctx, id, func(all io.Reader) error {
		return n.canary.search("the readable state of a sandbox", all)
	})
}

// read returns everything.
func (b *box) read() []byte {
	b.t.Helper()
	var all []byte
	err := b.node.everything(testkit.Context(b.t), b.id, func(r io.Reader) (err error) {
		all, err = io.ReadAll(r)
		return err
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return all
}

// plants are commands that leave a value where programs of the sandbox can read it.
// They get it as $1 with commas in it, so that it is nowhere else.
var plants = map[string]string{
	"a new file":               `mkdir -p /root/.cache/a && echo "$1" | tr -d , >/root/.cache/a/b`,
	"a changed file":           `echo "$1" | tr -d , >>/etc/profile`,
	"a file in memory":         `echo "$1" | tr -d , >/dev/shm/a`,
	"the name of a file":       `touch "/var/tmp/$(echo "$1" | tr -d ,)"`,
	"the end of a link":        `ln -s "/nowhere/$(echo "$1" | tr -d ,)" /var/tmp/link`,
	"the words of a command":   `setsid sh -c 'sleep 1000; true' "$(echo "$1" | tr -d ,)" >/dev/null 2>&1 &`,
	"an environment":           `TEXT="$(echo "$1" | tr -d ,)" setsid sleep 1000 >/dev/null 2>&1 &`,
	"a file that was unlinked": `echo "$1" | tr -d , >/var/tmp/gone; exec 3</var/tmp/gone; rm /var/tmp/gone; setsid sleep 1000 >/dev/null 2>&1 &`,
	"the memory of a program": `setsid python3 -c 'import sys, time; kept = sys.argv[1].replace(",", ""); print("ready", flush=True); time.sleep(1000)' "$1" >/var/tmp/ready &
		until [ -s /var/tmp/ready ]; do sleep 0.01; done`,
	"a core dump": `cd /var/tmp && ulimit -c unlimited && python3 -c 'import os, sys; kept = sys.argv[1].replace(",", ""); os.abort()' "$1"; true`,
}

// The search in sandboxes at their end is worth as much as it can find.
func TestCanaryFindsReadableState(t *testing.T) {
	b := commonNode(t).newBox(t)
	pattern, err := os.ReadFile("/proc/sys/kernel/core_pattern")
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]string{}
	for place, command := range plants {
		if place == "a core dump" && strings.ContainsAny(string(pattern[:1]), "|/") {
			continue // this host keeps those elsewhere, out of the reach of sandboxes
		}
		sum := sha256.Sum256([]byte(place))
		value := hex.EncodeToString(sum[:16])
		values[place] = value
		text := strings.Join(strings.Split(value, ""), ",")
		r, err := b.node.API.Exec(testkit.Context(t), b.id, client.ExecRequest{Command: types.Command{Argv: []string{"sh", "-c", command, "sh", text}}})
		if err != nil || r.ExitCode != 0 {
			t.Fatalf("%s: %+v, %v", place, r, err)
		}
	}
	all := b.read()
	for place, value := range values {
		var c canary
		c.watch(value)
		if err := c.search(place, bytes.NewReader(all)); err == nil {
			t.Errorf("the secret in %s is not found", place)
		}
	}
}
