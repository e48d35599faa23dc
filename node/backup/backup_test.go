package backup

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/runtime/store"
	"github.com/doze-run/doze/testkit"
)

// killEnv makes the test binary a restore that kills itself at a step: the step, the backup
// and the home.
const killEnv = "DOZE_BACKUP_TEST_KILL"

func TestMain(m *testing.M) {
	if os.Getenv(killEnv) != "" {
		os.Exit(restoreAndDie(os.Args[1], os.Args[2], os.Args[3]))
	}
	testkit.Main(m)
}

func restoreAndDie(at, file, home string) int {
	f, err := os.Open(file)
	if err == nil {
		_, err = restore(f, home, func(step string) {
			if step == at {
				syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
		})
	}
	fmt.Fprintln(os.Stderr, "the step was not reached:", err)
	return 1
}

// rig is the home of a node with its open store.
type rig struct {
	t     *testing.T
	home  string
	store *store.Badger
}

var module = []byte("\x00asm\x01\x00\x00\x00")

func policyName(module []byte) string {
	sum := sha256.Sum256(module)
	return policies + "/" + hex.EncodeToString(sum[:]) + ".wasm"
}

// files of a home that a backup contains.
func files() map[string]string {
	return map[string]string{
		tokenFile: "doze_token\n", keyFile: "key\n", policyName(module): string(module), policies + "/" + strings.Repeat("0", 64) + ".wasm": "",
		"caddy/pki/authorities/local/root.crt": "root", "caddy/certificates/a/a.key": "private",
	}
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, home: filepath.Join(t.TempDir(), "home")}
	var err error
	if r.store, err = node.OpenStore(r.home, testkit.NewLog(t).Logger()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.store.Close() })
	for n := range 300 {
		testkit.NoError(t, "put", r.store.PutDocument(t.Context(), "rules", fmt.Sprint(n), []byte(strings.Repeat("v", n))))
	}
	r.write(files())
	r.write(map[string]string{
		"caddy/locks/a.lock": "no", "egress/compiled/x": "no", policies + "/.new-1": "no", "run/x": "no", "backups/cache": "no", "node.log": "no", "caddy/large": strings.Repeat("x", maxSmall+1),
	})
	testkit.NoError(t, "link", os.Symlink("/etc/passwd", filepath.Join(r.home, "caddy/link")))
	return r
}

func (r *rig) write(files map[string]string) {
	r.t.Helper()
	for name, content := range files {
		file := filepath.Join(r.home, filepath.FromSlash(name))
		testkit.NoError(r.t, "make folder", os.MkdirAll(filepath.Dir(file), 0o700))
		testkit.NoError(r.t, "write", os.WriteFile(file, []byte(content), 0o600))
	}
}

func (r *rig) source() Source { return Source{Home: r.home, Store: r.store, Version: "v1.2.3"} }

func (r *rig) backup() []byte {
	r.t.Helper()
	return mustWrite(r.t, r.source())
}

func mustWrite(t testing.TB, src Source) []byte {
	t.Helper()
	var b bytes.Buffer
	testkit.NoError(t, "back up", Write(context.Background(), &b, src))
	return b.Bytes()
}

// entries returns the content of an open store.
func entries(t testing.TB, s *store.Badger) map[string]string {
	t.Helper()
	export, err := s.BeginExport(t.Context())
	testkit.NoError(t, "export", err)
	defer export.Close()
	all := map[string]string{}
	testkit.NoError(t, "export", export.Entries(t.Context(), func(key, value []byte) error {
		all[string(key)] = string(value)
		return nil
	}))
	return all
}

// filesOf returns the regular files of a home except the store's.
func filesOf(t testing.TB, home string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(home, func(file string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if file == node.StoreDir(home) {
			return fs.SkipDir
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		if info.Mode().Perm()&0o077 != 0 && info.Mode().Type() != fs.ModeSymlink {
			t.Errorf("%s has mode %o", file, info.Mode())
		}
		if entry.Type().IsRegular() {
			content, err := os.ReadFile(file)
			files[strings.TrimPrefix(file, home+"/")] = string(content)
			return err
		}
		return nil
	})
	testkit.NoError(t, "read the home", err)
	return files
}

// mustBeRestored compares a home with the node of a rig.
func (r *rig) mustBeRestored(home string, files map[string]string) {
	r.t.Helper()
	want := maps.Clone(files)
	want["node_id"] = r.store.NodeID() + "\n"
	testkit.Diff(r.t, "the files", filesOf(r.t, home), want)
	s, err := node.OpenStore(home, testkit.NewLog(r.t).Logger())
	testkit.NoError(r.t, "open", err)
	defer s.Close()
	if got, want := entries(r.t, s), entries(r.t, r.store); !maps.Equal(got, want) {
		r.t.Errorf("the store has %d entries, want %d, or they differ", len(got), len(want))
	}
}

func TestABackupIsRestored(t *testing.T) {
	r := newRig(t)
	b := r.backup()
	contents, err := Check(bytes.NewReader(b))
	testkit.NoError(t, "check", err)
	if since := time.Since(contents.Created); since < 0 || since > time.Hour {
		t.Errorf("it was created %s ago", since)
	}
	contents.Created = time.Time{}
	testkit.Diff(t, "the contents", contents, Contents{
		Header:  Header{Schema: 1, Version: "v1.2.3", Node: r.store.NodeID(), Commits: r.store.Commits(), SealingKey: true},
		Entries: len(entries(t, r.store)), Files: len(files()),
	})
	home := filepath.Join(t.TempDir(), "a", "b")
	restored, err := Restore(bytes.NewReader(b), home)
	testkit.NoError(t, "restore", err)
	if restored.Entries != contents.Entries || restored.Node != contents.Node {
		t.Errorf("restored %+v", restored)
	}
	r.mustBeRestored(home, files())
}

func TestABackupWithoutTheKeyHasNothingThatGrantsAccess(t *testing.T) {
	r := newRig(t)
	src := r.source()
	src.WithoutKey = true
	b := mustWrite(t, src)
	home := filepath.Join(t.TempDir(), "home")
	// The operator puts the key there first.
	testkit.NoError(t, "make folder", os.MkdirAll(filepath.Join(home, "egress"), 0o700))
	testkit.NoError(t, "write", os.WriteFile(filepath.Join(home, keyFile), []byte("kept elsewhere"), 0o600))
	contents, err := Restore(bytes.NewReader(b), home)
	if err != nil || contents.SealingKey {
		t.Fatalf("restored %+v, %v", contents, err)
	}
	want := map[string]string{keyFile: "kept elsewhere"}
	for name, content := range files() {
		if strings.HasPrefix(name, policies) {
			want[name] = content
		}
	}
	r.mustBeRestored(home, want)
}

func TestAStoppedNodeIsBackedUp(t *testing.T) {
	r := newRig(t)
	want := entries(t, r.store)
	src := Source{Home: r.home, Version: "v1"}
	testkit.ErrorIs(t, "back up a running node", WriteStopped(t.Context(), io.Discard, src), store.ErrInUse)
	testkit.NoError(t, "close", r.store.Close())
	var b bytes.Buffer
	testkit.NoError(t, "back up", WriteStopped(t.Context(), &b, src))
	if contents, err := Check(&b); err != nil || contents.Entries != len(want) {
		t.Errorf("got %+v, %v; want %d entries", contents, err, len(want))
	}
	if err := WriteStopped(t.Context(), io.Discard, Source{Home: t.TempDir()}); err == nil || !strings.Contains(err.Error(), "no data of a node") {
		t.Errorf("an empty folder: %v", err)
	}
}

// mustRefuse restores to an empty folder, which must stay as it is.
func mustRefuse(t *testing.T, what string, backup []byte, want error) {
	t.Helper()
	home := filepath.Join(t.TempDir(), "home")
	_, err := Restore(bytes.NewReader(backup), home)
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
	if _, err := os.Lstat(home); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: the folder was changed: %v", what, err)
	}
}

func TestATruncatedBackupIsRefused(t *testing.T) {
	b := newRig(t).backup()
	for n := len(magic) / 2; n < len(b); n += 1 + n/7 {
		mustRefuse(t, fmt.Sprintf("%d of %d bytes", n, len(b)), b[:n], ErrTruncated)
	}
	for n := 1; n <= 40; n++ { // within the checksum and the end
		mustRefuse(t, fmt.Sprintf("%d bytes missing", n), b[:len(b)-n], ErrTruncated)
	}
}

func TestADamagedBackupIsRefused(t *testing.T) {
	b := newRig(t).backup()
	start := bytes.IndexByte(b[len(magic):], '\n') + len(magic) + 1 // of the chunks
	for at := start + 4; at < len(b); at += 1 + (at-start)/5 {
		changed := slices.Clone(b)
		changed[at] ^= 0x10
		_, err := Check(bytes.NewReader(changed))
		if !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrTruncated) { // a length became larger
			t.Errorf("byte %d of %d: %v", at, len(b), err)
		}
	}
	changed := slices.Clone(b)
	changed[len(b)/2] ^= 1
	mustRefuse(t, "a wrong byte", changed, ErrDamaged)
	mustRefuse(t, "a wrong checksum", append(slices.Clone(b[:len(b)-1]), ^b[len(b)-1]), ErrDamaged)
	mustRefuse(t, "data after the end", append(slices.Clone(b), 'x'), ErrDamaged)
	mustRefuse(t, "another header", bytes.Replace(b, []byte(`"commits":`), []byte(`"commits":1`), 1), ErrDamaged)
	mustRefuse(t, "a broken header", bytes.Replace(b, []byte(`{"schema"`), []byte(`["schema"`), 1), ErrDamaged)
	for what, other := range map[string]string{"an empty file": "", "another file": "PK\x03\x04 and so on, longer than the first line", "a short file": "nope"} {
		mustRefuse(t, what, []byte(other), ErrFormat)
	}
}

// invalid writes a backup with a right checksum.
func invalid(t *testing.T, h Header, fill func(w *writer) error) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := newWriter(&b, h)
	testkit.NoError(t, "write", err)
	testkit.NoError(t, "write", fill(w))
	testkit.NoError(t, "write", w.writeEnd())
	return b.Bytes()
}

func TestABackupOfALaterVersionIsRefused(t *testing.T) {
	r := newRig(t)
	b := invalid(t, Header{Schema: Schema + 1, Version: "v9.0.0", Node: r.store.NodeID()}, func(*writer) error { return nil })
	_, err := Restore(bytes.NewReader(b), filepath.Join(t.TempDir(), "home"))
	want := "doze v9.0.0 wrote the backup with schema 2, but this version reads schemas up to 1; restore it with that version or a later one"
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestAnInvalidBackupIsRefused(t *testing.T) {
	r := newRig(t)
	header := Header{Schema: Schema, Node: r.store.NodeID()}
	file := func(names ...string) func(*writer) error {
		return func(w *writer) error {
			for _, name := range names {
				if err := w.file(name, 1, strings.NewReader("x")); err != nil {
					return err
				}
			}
			return nil
		}
	}
	entry := func(all ...string) func(*writer) error {
		return func(w *writer) error {
			for n := 0; n < len(all); n += 2 {
				if err := w.entry([]byte(all[n]), []byte(all[n+1])); err != nil {
					return err
				}
			}
			return nil
		}
	}
	for what, fill := range map[string]func(*writer) error{
		"a path that leads out":      file("caddy/../../x"),
		"an absolute path":           file("/etc/passwd"),
		"a file of another kind":     file("Caddyfile"),
		"a store as a file":          file("store/MANIFEST"),
		"a policy with another name": file(policies + "/x.wasm"),
		"a file twice":               file("token", "token"),
		"files out of order":         file("token", "egress/seal.key"),
		"a key twice":                entry("d/a", "\x02x", "d/a", "\x02y"),
		"keys out of order":          entry("d/b", "\x02x", "d/a", "\x02y"),
		"an invalid key":             entry("x", "\x02x"),
		"an empty value":             entry("d/a", ""),
		"a value that is too long":   entry("d/a", strings.Repeat("x", maxChunk)),
		"an entry after a file":      func(w *writer) error { return errors.Join(file("token")(w), entry("d/a", "\x02x")(w)) },
		"an unknown record":          func(w *writer) error { return w.record(9) },
		"another count":              func(w *writer) error { w.counts[0]++; return nil },
		"a length beyond the end":    func(w *writer) error { _, err := w.Write([]byte{recordEntry, 200, 1, 'd'}); return err },
		"a file that is too large": func(w *writer) error {
			_, err := w.Write([]byte("\x02\x05token\xff\xff\xff\xff\x0f"))
			return err
		},
		"data after the last record": func(w *writer) error {
			_, err := w.Write([]byte{recordEnd, 0, 0, 1})
			return err
		},
	} {
		b := invalid(t, header, fill)
		home := filepath.Join(t.TempDir(), "home")
		if _, err := Restore(bytes.NewReader(b), home); err == nil || !strings.HasPrefix(err.Error(), "the backup is invalid: ") {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := os.Lstat(home); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the folder was changed: %v", what, err)
		}
	}
	// Only the store notices that its id is missing.
	b := invalid(t, header, entry("d/rules/a", "\x02x"))
	home := filepath.Join(t.TempDir(), "home")
	if _, err := Restore(bytes.NewReader(b), home); err == nil || !strings.Contains(err.Error(), "read the node's id") {
		t.Errorf("no node id: %v", err)
	}
	if files := filesOf(t, home); len(files) > 0 {
		t.Errorf("the folder has %v", files)
	}
}

func TestRestoreRefusesAHomeWithOtherData(t *testing.T) {
	r := newRig(t)
	b := r.backup()
	_, err := Restore(bytes.NewReader(b), r.home)
	testkit.ErrorIs(t, "restore where the node runs", err, store.ErrInUse)
	testkit.NoError(t, "close", r.store.Close())

	before := filesOf(t, r.home)
	_, err = Restore(bytes.NewReader(b), r.home)
	testkit.ErrorIs(t, "restore to a home with a store", err, ErrNotEmpty)
	testkit.Diff(t, "the files", filesOf(t, r.home), before)
	testkit.NoError(t, "verify", store.Verify(node.StoreDir(r.home)))

	for name, content := range map[string]string{"node_id": "zzzzzzzzzzzz\n", tokenFile: "another", keyFile: "another", policyName(module): "another"} {
		other := &rig{t: t, home: filepath.Join(t.TempDir(), "home")}
		other.write(map[string]string{name: content})
		_, err := Restore(bytes.NewReader(b), other.home)
		testkit.ErrorIs(t, "restore to a home with another "+name, err, ErrNotEmpty)
		testkit.Diff(t, "the files", filesOf(t, other.home), map[string]string{name: content})
		if empty, err := store.Empty(node.StoreDir(other.home)); !empty || err != nil {
			t.Errorf("%s: the home has a store: %v", name, err)
		}
	}
}

// Podman's storage of user doze is in the node's home.
func TestRestoreKeepsForeignFiles(t *testing.T) {
	r := newRig(t)
	home := filepath.Join(t.TempDir(), "home")
	foreign := &rig{t: t, home: home}
	foreign.write(map[string]string{".local/share/containers/x": "disk", "Caddyfile": "config"})
	_, err := Restore(bytes.NewReader(r.backup()), home)
	testkit.NoError(t, "restore", err)
	want := files()
	want[".local/share/containers/x"], want["Caddyfile"] = "disk", "config"
	r.mustBeRestored(home, want)
}

func TestAKilledRestoreIsRepeated(t *testing.T) {
	r := newRig(t)
	file := filepath.Join(t.TempDir(), "backup")
	testkit.NoError(t, "write", os.WriteFile(file, r.backup(), 0o600))
	var steps []string
	f, err := os.Open(file)
	testkit.NoError(t, "open", err)
	defer f.Close()
	_, err = restore(f, filepath.Join(t.TempDir(), "home"), func(step string) { steps = append(steps, step) })
	testkit.NoError(t, "restore", err)
	if len(steps) != 6+len(files()) {
		t.Fatalf("the steps are %q", steps)
	}
	for _, step := range steps {
		home := filepath.Join(t.TempDir(), "home")
		cmd := exec.Command(os.Args[0], step, file, home)
		cmd.Env = append(os.Environ(), killEnv+"=1")
		out, err := cmd.CombinedOutput()
		if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() {
			t.Fatalf("%s: the restore ended with %v: %s", step, err, out)
		}
		if step == "end" {
			continue // nothing is left to do
		}
		if empty, err := store.Empty(node.StoreDir(home)); !empty || err != nil {
			t.Errorf("%s: there is a store: %v", step, err)
		}
		if id, err := node.ReadNodeID(home); err != nil || id != "" {
			// A node must not start on half of the data.
			var damage *store.DamageError
			if _, err := node.OpenStore(home, testkit.NewLog(t).Logger()); !errors.As(err, &damage) {
				t.Errorf("%s: a node opens the store: %v", step, err)
			}
		}
		_, err = f.Seek(0, io.SeekStart)
		testkit.NoError(t, "seek", err)
		if _, err := Restore(f, home); err != nil {
			t.Errorf("%s: the next restore: %v", step, err)
			continue
		}
		r.mustBeRestored(home, files())
	}
}

// A policy that is stored has its file, whenever the backup begins.
func TestABackupDuringChangesOfPoliciesIsConsistent(t *testing.T) {
	r := newRig(t)
	modules, err := catalog.Open(t.Context(), r.store, filepath.Join(r.home, policies))
	testkit.NoError(t, "open", err)
	src := r.source()
	src.HoldPolicies = modules.Hold
	stop := make(chan struct{})
	var all sync.WaitGroup
	defer all.Wait()
	defer close(stop)
	for n := range 3 {
		all.Go(func() {
			name := fmt.Sprintf("policy-%d", n)
			for round := 0; ; round++ {
				select {
				case <-stop:
					return
				default:
				}
				_, err := modules.Put(t.Context(), "owner", name, fmt.Appendf(nil, "%d %d", n, round))
				if err == nil && round%3 == 2 {
					err = modules.Delete(t.Context(), "owner", name)
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 30 {
		var b bytes.Buffer
		testkit.NoError(t, "back up", Write(t.Context(), &b, src))
		stored, present := map[string]bool{}, map[string]bool{}
		_, err := read(&b, visitor{
			entry: func(key, value []byte) error {
				if !bytes.HasPrefix(key, []byte("d/policies/")) {
					return nil
				}
				var info catalog.Info
				err := json.Unmarshal(value[1:], &info)
				stored[policies+"/"+strings.TrimPrefix(info.Digest, "sha256:")+".wasm"] = true
				return err
			},
			file: func(name string, _ int64, content io.Reader) error {
				b, err := io.ReadAll(content)
				if strings.HasPrefix(name, policies) && policyName(b) != name {
					t.Errorf("%s contains %q", name, b)
				}
				present[name] = true
				return err
			},
		})
		testkit.NoError(t, "read", err)
		for name := range stored {
			if !present[name] {
				t.Fatalf("the backup lacks %s, to which a document refers", name)
			}
		}
	}
}

func TestABackupEndsWithItsContext(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	testkit.ErrorIs(t, "back up", Write(ctx, io.Discard, r.source()), context.Canceled)
	testkit.NoError(t, "close", r.store.Close()) // no export is open
	if err := Write(t.Context(), io.Discard, r.source()); err == nil {
		t.Error("a closed store was backed up")
	}
}

func TestAWriterThatFailsEndsTheBackup(t *testing.T) {
	r := newRig(t)
	full := errors.New("no space left")
	for _, limit := range []int{0, 10, 100, 1000, len(r.backup()) - 1} {
		testkit.ErrorIs(t, "back up", Write(t.Context(), &limited{limit, full}, r.source()), full)
	}
}

type limited struct {
	left int
	err  error
}

func (l *limited) Write(b []byte) (int, error) {
	if len(b) > l.left {
		return 0, l.err
	}
	l.left -= len(b)
	return len(b), nil
}

// FuzzCheck: any file is a backup or an error, in bounded memory.
func FuzzCheck(f *testing.F) {
	var b bytes.Buffer
	w, err := newWriter(&b, Header{Schema: Schema, Node: "k3f9x2m7q1az"})
	if err == nil {
		err = errors.Join(w.entry([]byte("d/rules/a"), []byte("\x02value")), w.file(tokenFile, 1, strings.NewReader("x")), w.writeEnd())
	}
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		if contents, err := Check(bytes.NewReader(b)); err == nil && (contents.Schema != Schema || contents.Node == "") {
			t.Errorf("got %+v", contents)
		}
	})
}
