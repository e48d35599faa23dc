//go:build integration

package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/test/testnode"
	"github.com/doze-run/doze/testkit"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

func TestMissingImageIsAProblemAndLeavesNothing(t *testing.T) {
	n := commonNode(t)
	const image = "localhost/nobody/has/this:v1"
	_, _, err := n.API.Create(testkit.Context(t), types.CreateSandboxRequest{Name: "no-image", Image: image})
	if !problem.Has(err, problem.ImageUnavailable) || !strings.Contains(err.Error(), image) {
		t.Errorf("got %v", err)
	}
	_, _, err = n.API.Create(testkit.Context(t), types.CreateSandboxRequest{Name: "no-image", Image: "example.com/a:b"})
	if !problem.Has(err, problem.ImageNotAllowed) {
		t.Errorf("an image that is not allowed: %v", err)
	}
	if _, err := n.API.Get(testkit.Context(t), "no-image"); !problem.Has(err, problem.SandboxNotFound) {
		t.Errorf("it exists: %v", err)
	}
	known := map[string]bool{}
	all, err := n.API.List(testkit.Context(t), client.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range all {
		known[sb.ID] = true
	}
	if left := unknown(t, n, known); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	b := n.newBox(t) // the name is free again
	b.exec("true")
}

func TestHugeNamesAreRefused(t *testing.T) {
	n := commonNode(t)
	long := strings.Repeat("a", mib)
	for _, c := range []struct {
		name, method, path, body string
		status                   int
		code                     string
	}{
		{"more than a body may have", "POST", "/sandbox", `{"name":"` + long + `"}`, http.StatusRequestEntityTooLarge, "body_too_large"},
		{"as much as a body may have", "POST", "/sandbox", `{"name":"` + long[:mib-100] + `"}`, http.StatusUnprocessableEntity, "name_invalid"},
		{"image", "POST", "/sandbox", `{"name":"a","image":"` + long[:mib-100] + `"}`, http.StatusUnprocessableEntity, ""},
		{"label", "POST", "/sandbox", `{"name":"a","labels":{"` + long[:mib-100] + `":"b"}}`, http.StatusUnprocessableEntity, "request_invalid"},
		{"path", "GET", "/sandbox/" + long[:17_000], "", http.StatusRequestURITooLong, "uri_too_long"},
		{"deep JSON", "POST", "/sandbox", strings.Repeat("[", mib-100), http.StatusBadRequest, "json_invalid"},
	} {
		t.Run(c.name, func(t *testing.T) {
			status, text := n.do(t, c.method, c.path, "application/json", strings.NewReader(c.body))
			if status != c.status || !strings.Contains(text, `"code":"`+c.code) || len(text) > 4<<10 {
				t.Errorf("got %d with %d bytes: %.300s", status, len(text), text)
			}
		})
	}
	if _, err := n.API.Get(testkit.Context(t), "a"); !problem.Has(err, problem.SandboxNotFound) {
		t.Errorf("a refused request has made a sandbox: %v", err)
	}
}

func TestArchivesThatReachOutAreRefused(t *testing.T) {
	b := commonNode(t).newBox(t)
	for name, entries := range map[string][]tar.Header{
		"parent":               {{Name: "../out"}},
		"parent within":        {{Name: "a/../../out"}},
		"absolute":             {{Name: "/out"}},
		"through a link":       {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/"}, {Name: "l/out"}},
		"through a deep link":  {{Name: "d", Typeflag: tar.TypeDir}, {Name: "d/l", Typeflag: tar.TypeSymlink, Linkname: "../.."}, {Name: "d/l/out"}},
		"symlink out":          {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "../../etc/shadow"}},
		"hard link out":        {{Name: "l", Typeflag: tar.TypeLink, Linkname: "../../etc/shadow"}},
		"hard link, absolute":  {{Name: "l", Typeflag: tar.TypeLink, Linkname: "/etc/shadow"}},
		"device":               {{Name: "out", Typeflag: tar.TypeBlock, Devmajor: 8}},
		"link that is written": {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/out"}, {Name: "l"}},
	} {
		t.Run(name, func(t *testing.T) {
			var archive bytes.Buffer
			w := tar.NewWriter(&archive)
			for _, h := range entries {
				h.Mode = 0o644
				if h.Typeflag == 0 {
					h.Typeflag, h.Size = tar.TypeReg, 4
				}
				b.must(w.WriteHeader(&h))
				if h.Size > 0 {
					_, err := w.Write([]byte("evil"))
					b.must(err)
				}
			}
			b.must(w.Close())
			err := b.node.API.PutArchive(testkit.Context(t), b.id, "/srv/in", &archive)
			want := problem.ArchiveUnsafe
			if name == "device" {
				want = problem.RequestInvalid
			}
			if !problem.Has(err, want) {
				t.Errorf("got %v, want %s", err, want)
			}
			if found := b.exec("find / /srv /srv/in -xdev -maxdepth 2 -name out; find /srv -type f -links +1; find /srv -type l; find /srv -type b"); found != "" {
				t.Errorf("it left %s", found)
			}
			b.exec("rm -rf /srv/in")
		})
	}
}

// pattern is a stream of bytes that does not repeat within a read.
type pattern struct{ at uint64 }

func (p *pattern) Read(b []byte) (int, error) {
	for i := 0; i+8 <= len(b); i += 8 {
		p.at = p.at*6364136223846793005 + 1442695040888963407
		b[i], b[i+1], b[i+2], b[i+3] = byte(p.at>>56), byte(p.at>>48), byte(p.at>>40), byte(p.at>>32)
		b[i+4], b[i+5], b[i+6], b[i+7] = byte(p.at>>24), byte(p.at>>16), byte(p.at>>8), byte(p.at)
	}
	return len(b) &^ 7, nil
}

func TestFileOfAGigabytePassesThroughUpAndDown(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	sent, received := sha256.New(), sha256.New()
	n.StaysSmall(t, func() {
		file, err := n.API.WriteFile(t.Context(), b.id, "/srv/big", 0, io.TeeReader(io.LimitReader(&pattern{}, gib), sent))
		b.must(err)
		if file.Size != gib {
			t.Errorf("%d bytes are written", file.Size)
		}
	})
	n.StaysSmall(t, func() {
		req, err := http.NewRequestWithContext(t.Context(), "GET", n.URL("/sandbox/"+b.id+"/files/read?path=/srv/big"), nil)
		b.must(err)
		req.Header.Set("Authorization", "Bearer "+n.Token)
		c := n.browser(t, "h2")
		c.Timeout = 0 // a gigabyte takes as long as it takes
		resp, err := c.Do(req)
		b.must(err)
		defer resp.Body.Close()
		size, err := io.Copy(received, resp.Body)
		if err != nil || size != gib || resp.ContentLength != gib {
			t.Errorf("got %d bytes of %d: %v", size, resp.ContentLength, err)
		}
	})
	if want, got := hex.EncodeToString(sent.Sum(nil)), hex.EncodeToString(received.Sum(nil)); got != want {
		t.Errorf("sent %s, received %s", want, got)
	}
}

func TestTenThousandFilesPassAsATar(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	const files = 10_000
	reader, writer := io.Pipe()
	go func() { // ends with the reader
		w := tar.NewWriter(writer)
		var err error
		for i := 0; i < files && err == nil; i++ {
			body := strings.Repeat("x", i%4096)
			if err = w.WriteHeader(&tar.Header{Name: fmt.Sprintf("d%d/e%d/f%d", i%7, i%91, i), Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(body))}); err == nil {
				_, err = io.WriteString(w, body)
			}
		}
		if err == nil {
			err = w.Close()
		}
		writer.CloseWithError(err)
	}()
	n.StaysSmall(t, func() { b.must(n.API.PutArchive(testkit.Context(t), b.id, "/srv/many", reader)) })
	reader.Close()
	if count := b.exec("find /srv/many -type f | wc -l"); count != strconv.Itoa(files) {
		t.Errorf("%s files have arrived", count)
	}
	out, err := n.API.GetArchive(testkit.Context(t), b.id, "/srv/many")
	b.must(err)
	defer out.Close()
	count := 0
	for r := tar.NewReader(out); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		b.must(err)
		if h.Typeflag != tar.TypeReg {
			continue
		}
		count++
		_, number, _ := strings.Cut(h.Name, "/f")
		if i, err := strconv.Atoi(number); err != nil || h.Size != int64(i%4096) {
			t.Fatalf("%s has %d bytes", h.Name, h.Size)
		}
	}
	if count != files {
		t.Errorf("%d files came back", count)
	}
}

func TestGigabyteOfOutputIsCutAndTheCommandGoesOn(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	const command = "yes 0123456789abcdef | head -c 1000000000; echo done >&2; exit 3"
	n.StaysSmall(t, func() {
		result, err := n.API.Exec(t.Context(), b.id, client.ExecRequest{Command: types.Command{Command: command}, Timeout: client.NoTimeout})
		b.must(err)
		if !result.Truncated || len(result.Stdout) != mib || result.ExitCode != 3 || result.Stderr != "done\n" {
			t.Errorf("truncated %t, %d bytes, exit code %d, stderr %q", result.Truncated, len(result.Stdout), result.ExitCode, result.Stderr)
		}
	})
	n.StaysSmall(t, func() {
		p, err := n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{Command: types.Command{Command: command}, Name: "loud"})
		b.must(err)
		var exit *types.Process
		b.must(n.API.Logs(t.Context(), b.id, p.ID, true, func(l client.Log) error { exit = l.Exit; return nil }))
		if exit == nil || exit.ExitCode == nil || *exit.ExitCode != 3 {
			t.Errorf("it ended as %+v", exit)
		}
		kept := 0
		b.must(n.API.Logs(testkit.Context(t), b.id, p.ID, false, func(l client.Log) error { kept += len(l.Data); return nil }))
		if kept == 0 || kept > 512<<10 {
			t.Errorf("%d bytes of its output are kept", kept)
		}
		size, err := strconv.Atoi(b.exec("cat " + p.LogFile + "* | wc -c"))
		if err != nil || size == 0 || size > 64*mib {
			t.Errorf("its log files have %d bytes, %v", size, err)
		}
	})
	n.StaysSmall(t, func() {
		size, end := n.stream(t, b, command)
		if size < 1_000_000_000 || !strings.Contains(end, "event: complete") || !strings.Contains(end, `"exit_code":3`) {
			t.Errorf("the stream has %d bytes and ends with %s", size, end)
		}
	})
	b.exec("true")
}

// stream runs a command, and returns the size and the end of its events as they
// come over the wire.
func (n *node) stream(t *testing.T, b *box, command string) (size int, end string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "POST", n.URL("/sandbox/"+b.id+"/exec"), strings.NewReader(fmt.Sprintf(`{"command":%q,"stream":true}`, command)))
	b.must(err)
	req.Header.Set("Authorization", "Bearer "+n.Token)
	req.Header.Set("Content-Type", "application/json")
	c := n.browser(t, "h1")
	c.Timeout = 0 // it takes as long as it takes
	resp, err := c.Do(req)
	b.must(err)
	defer resp.Body.Close()
	for chunk := make([]byte, 64<<10); ; {
		read, err := resp.Body.Read(chunk)
		size += read
		end += string(chunk[:read])
		end = end[max(0, len(end)-512):]
		if err == io.EOF {
			return size, end
		}
		b.must(err)
	}
}

// mostGuest bounds the memory of an idle guest.
const mostGuest = 8_000_000

func TestIdleGuestIsSmall(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	guest := b.hostPID()
	b.exec("seq 100000")
	b.write("/srv/file", bytes.Repeat([]byte("x"), 8*mib))
	for i := range 20 {
		b.exec(fmt.Sprint("echo ", i))
		b.write(fmt.Sprint("/srv/file-", i), []byte("small"))
	}
	out, err := n.API.GetArchive(testkit.Context(t), b.id, "/srv")
	b.must(err)
	_, err = io.Copy(io.Discard, out)
	b.must(errors.Join(err, out.Close()))
	p, err := n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{Command: types.Command{Command: "seq 100000; exec sleep 100000"}})
	b.must(err)
	b.must(n.API.Logs(testkit.Context(t), b.id, p.ID, false, func(client.Log) error { return nil }))
	// It gives memory back soon after the last request.
	testkit.Eventually(t, "its guest is small", func() bool { return testnode.Memory(t, guest, "VmRSS") <= mostGuest })
	b.sleep()
	if size := testnode.Memory(t, guest, "VmRSS"); size > mostGuest {
		t.Errorf("asleep its guest has %d bytes", size)
	}
	t.Logf("its guest has %d bytes, at most %d", testnode.Memory(t, guest, "VmRSS"), testnode.Memory(t, guest, "VmHWM"))
}

func TestForkBombIsBoundedAndCanBeDestroyed(t *testing.T) {
	n := commonNode(t)
	other := n.newWebBox(t)
	b := n.newBox(t, func(req *types.CreateSandboxRequest) { req.Size = "lite" })
	most := 128 // of lite
	_, err := n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{Command: types.Command{Argv: []string{"python3", "-c", "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass\n"}}})
	b.must(err)
	testkit.Eventually(t, "the bomb has gone off", func() bool { return len(b.hostPIDs()) > most/2 })
	c := n.browser(t, "h2")
	for range 20 {
		if count := len(b.hostPIDs()); count > most {
			t.Fatalf("it has %d processes, limit %d", count, most)
		}
		other.get(c, "/", http.StatusOK)
		other.exec("true")
	}
	b.must(n.API.Delete(testkit.Context(t), b.id))
	if left := b.hostPIDs(); len(left) != 0 {
		t.Errorf("%d of its processes are left", len(left))
	}
	other.exec("true")
}

const ignoresTerm = `trap "" TERM; echo ready; while :; do sleep 1000; done`

func TestCommandThatIgnoresSIGTERMIsKilledByItsTimeout(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	idle := len(b.hostPIDs())
	// A busy machine may need longer until both are ready.
	for timeout, ready := time.Second, false; !ready; timeout *= 2 {
		result, err := n.API.Exec(testkit.Context(t), b.id, client.ExecRequest{Command: types.Command{Command: ignoresTerm + " & " + ignoresTerm}, Timeout: types.Duration(timeout)})
		b.must(err)
		if !result.TimedOut || result.ExitCode == 0 {
			t.Errorf("got %+v", result)
		}
		testkit.Eventually(t, "the whole tree has ended", func() bool { return len(b.hostPIDs()) == idle })
		ready = strings.Count(result.Stdout, "ready") == 2
	}
}

func TestProcessThatIgnoresSIGTERMIsKilledByDelete(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	idle := len(b.hostPIDs())
	p, err := n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{Command: types.Command{Command: ignoresTerm}, Restart: "always"})
	b.must(err)
	ctx, heard := context.WithCancel(testkit.Context(t))
	_ = n.API.Logs(ctx, b.id, p.ID, true, func(client.Log) error { heard(); return nil })
	stopped, err := n.API.StopProcess(testkit.Context(t), b.id, p.ID, "")
	b.must(err)
	if stopped.State != "exited" || stopped.Signal != "SIGKILL" {
		t.Errorf("got %+v", stopped)
	}
	testkit.Eventually(t, "the whole tree has ended", func() bool { return len(b.hostPIDs()) == idle })
}

func TestSandboxWhoseProcessIgnoresSIGTERMStops(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	p, err := n.API.StartProcess(testkit.Context(t), b.id, types.StartProcessRequest{Command: types.Command{Command: ignoresTerm}})
	b.must(err)
	ctx, heard := context.WithCancel(testkit.Context(t))
	_ = n.API.Logs(ctx, b.id, p.ID, true, func(client.Log) error { heard(); return nil })
	b.stop()
	if left := b.hostPIDs(); len(left) != 0 {
		t.Errorf("%d of its processes are left", len(left))
	}
	if list := b.processes(); len(list) != 1 || list[0].State != "exited" || list[0].Signal != "SIGKILL" {
		t.Errorf("its processes: %+v", list)
	}
	b.exec("true")
}

func TestFullDiskOfASandboxIsAProblem(t *testing.T) {
	n := commonNode(t)
	b := n.newBox(t)
	b.exec("echo before >/dev/shm/f")
	size, err := strconv.Atoi(b.exec("df --output=size -B1 /dev/shm | tail -1"))
	if err != nil || size > gib {
		t.Fatalf("/dev/shm has %d bytes, %v", size, err)
	}
	_, err = n.API.WriteFile(testkit.Context(t), b.id, "/dev/shm/f", 0, io.LimitReader(&pattern{}, int64(2*size)))
	if !problem.Has(err, problem.SandboxDiskFull) {
		t.Errorf("got %v, want sandbox_disk_full", err)
	}
	if left := b.exec("ls -A /dev/shm; cat /dev/shm/f"); left != "f\nbefore" {
		t.Errorf("left: %s", left)
	}
	b.exec("true")
}
