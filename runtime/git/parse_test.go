package git

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const (
	hashA = "8f3c1f0e5a4b7d6c9e2f1a0b3c4d5e6f7a8b9c0d"
	hashB = "0123456789012345678901234567890123456789"
)

func TestParseProgress(t *testing.T) {
	for line, want := range map[string]Progress{
		"remote: Enumerating objects: 5, done.":                                         {Phase: PhaseEnumerating, Done: 5},
		"remote: Counting objects: 100% (5/5), done.":                                   {Phase: PhaseCounting, Done: 5, Total: 5},
		"remote: Compressing objects:   7% (1/13)":                                      {Phase: PhaseCompressing, Done: 1, Total: 13},
		"Receiving objects:  45% (450/1000)":                                            {Phase: PhaseReceiving, Done: 450, Total: 1000},
		"Receiving objects:  45% (450/1000), 1.50 MiB | 2.30 MiB/s":                     {Phase: PhaseReceiving, Done: 450, Total: 1000, Bytes: 3 << 19},
		"Receiving objects: 100% (1000/1000), 512 bytes | 512.00 KiB/s, done.":          {Phase: PhaseReceiving, Done: 1000, Total: 1000, Bytes: 512},
		"Resolving deltas: 100% (3/3), completed with 1 local object.":                  {Phase: PhaseResolving, Done: 3, Total: 3},
		"Updating files:  12% (600/5000)":                                               {Phase: PhaseUpdating, Done: 600, Total: 5000},
		"Writing objects: 100% (3/3), 2.00 GiB, done.":                                  {Phase: PhaseWriting, Done: 3, Total: 3, Bytes: 2 << 30},
		"remote: Counting objects: 281474976710655, done.":                              {Phase: PhaseCounting, Done: 1<<48 - 1},
		"Receiving objects:  45% (450/1000), 999999999999999999999.00 GiB | 1.00 MiB/s": {Phase: PhaseReceiving, Done: 450, Total: 1000},
	} {
		got, ok := parseProgress(line)
		if diff := cmp.Diff(want, got); !ok || diff != "" {
			t.Errorf("%q: ok %v, %s", line, ok, diff)
		}
	}
	for _, line := range []string{
		"", "fatal: no", "Receiving objects", "Receiving objects: ", "Receiving objects: 45%", "Receiving objects: x% (1/2)", "Receiving objects: 1% (1)",
		"Receiving objects: 1% (2/1)", "Receiving objects: 1% (-1/2)", "Receiving objects: -1, done.", "Baking objects: 1% (1/2)",
		"Counting objects: 281474976710656, done.",
	} {
		if got, ok := parseProgress(line); ok {
			t.Errorf("%q: got %+v", line, got)
		}
	}
}

func TestMessagesAreBounded(t *testing.T) {
	m := messages{}
	for range 1000 {
		m.add([]byte("a line of text\rand another\n"))
	}
	m.add([]byte(strings.Repeat("x", 10*maxLine)))
	m.flush()
	total := 0
	for _, line := range m.text {
		total += len(line)
		if len(line) > maxLine {
			t.Errorf("a line has %d bytes", len(line))
		}
	}
	if total > maxMessages || total < maxMessages-maxLine {
		t.Errorf("%d bytes are stored", total)
	}
}

func TestParseStatus(t *testing.T) {
	text := strings.Join([]string{
		"# branch.oid " + hashA, "# branch.head next", "# branch.upstream origin/next", "# branch.ab +2 -13", "# stash 4",
		"1 .M N... 100644 100644 100644 " + hashA + " " + hashA + " a file",
		"1 AD N... 000000 100644 000000 " + hashB + " " + hashA + " dir/new",
		"2 R. N... 100644 100644 100644 " + hashA + " " + hashA + " R100 after", "before",
		"1 .M SC.. 160000 160000 160000 " + hashA + " " + hashA + " lib",
		"u UU N... 100644 100644 100644 100644 " + hashA + " " + hashA + " " + hashA + " both",
		"? not\nknown \xff", "",
	}, "\x00")
	want := Status{
		Head: Head{Branch: "next", Commit: hashA}, Upstream: "origin/next", Ahead: 2, Behind: 13,
		Files: []File{
			{Path: "a file", Index: Unmodified, Worktree: Modified},
			{Path: "dir/new", Index: Added, Worktree: Deleted},
			{Path: "after", OriginalPath: "before", Index: Renamed, Worktree: Unmodified},
			{Path: "lib", Index: Unmodified, Worktree: Modified, Submodule: true},
			{Path: "both", Index: Unmerged, Worktree: Unmerged, Conflict: BothModified},
			{Path: "not\nknown \uFFFD", Index: Untracked, Worktree: Untracked},
		},
	}
	got, err := parseStatus([]byte(text), false)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for i := range text {
		if s, err := parseStatus([]byte(text[:i]), true); err != nil || !s.Truncated || len(s.Files) > len(want.Files) {
			t.Fatalf("the first %d bytes: %+v, %v", i, s, err)
		}
	}
	for _, text := range []string{
		"x", "\x00", "1\x00", "? \x00", "# branch.oid main\x00", "# branch.head \x00", "# branch.ab 1 2\x00", "# branch.ab +x -2\x00", "# branch.ab +1 -99999999999\x00",
		"1 .X N... 1 1 1 a a path\x00", "1 .M N... 1 1 1 a a \x00", "1 .M N 1 1 1 a a path\x00", "1 .M N... 1 1 1 a path\x00",
		"2 R. N... 1 1 1 a a R100 after\x00", "u MM N... 1 1 1 1 a a a path\x00", "? " + strings.Repeat("x", maxPath+1) + "\x00", "fatal: no\x00",
	} {
		if s, err := parseStatus([]byte(text), false); !errors.Is(err, ErrOutput) {
			t.Errorf("%.40q: %+v, %v", text, s, err)
		}
	}
	many, err := parseStatus([]byte(strings.Repeat("? x\x00", MaxFiles+1)), false)
	if err != nil || len(many.Files) != MaxFiles || !many.Truncated {
		t.Errorf("%d files, truncated %v, %v", len(many.Files), many.Truncated, err)
	}
}

func TestParseNumstat(t *testing.T) {
	text := "1\t0\ta file\x00-\t-\timage.png\x003\t2\t\x00before\x00after\x00"
	want := []DiffFile{{Path: "a file", Added: 1}, {Path: "image.png", Binary: true}, {Path: "after", OriginalPath: "before", Added: 3, Deleted: 2}}
	d, err := parseNumstat([]byte(text), false)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, d.Files); diff != "" {
		t.Error(diff)
	}
	for i := range text {
		if d, err := parseNumstat([]byte(text[:i]), true); err != nil || !d.Truncated {
			t.Fatalf("the first %d bytes: %+v, %v", i, d, err)
		}
	}
	for _, text := range []string{"x", "\x00", "1\t2\x00", "x\t1\ta\x00", "1\t1\t\x00before\x00", "-1\t1\ta\x00", "1\t1\t\x00before\x00\x00"} {
		if d, err := parseNumstat([]byte(text), false); !errors.Is(err, ErrOutput) {
			t.Errorf("%q: %+v, %v", text, d, err)
		}
	}
}

func TestParseLog(t *testing.T) {
	record := func(fields ...string) string { return strings.Join(fields, "\x00") + "\x00" }
	first := record(hashA, hashB+" "+hashA, "A", "a@example.com", "1700000000", "C", "c@example.com", "99999999999999", "subject\n\nbody\n")
	second := record(hashB, "", "", "", "-5", "", "", "0", "")
	want := []Commit{
		{Hash: hashA, Parents: []string{hashB, hashA}, Author: Identity{"A", "a@example.com"}, AuthoredAt: time.Unix(1700000000, 0).UTC(),
			Committer: Identity{"C", "c@example.com"}, CommittedAt: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC), Message: "subject\n\nbody\n"},
		{Hash: hashB, Parents: []string{}, AuthoredAt: time.Unix(0, 0).UTC(), CommittedAt: time.Unix(0, 0).UTC()},
	}
	got, err := parseLog([]byte(first+second), false)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if cut, err := parseLog([]byte(first+second[:len(second)-1]), true); err != nil || len(cut) != 1 {
		t.Errorf("got %+v, %v", cut, err)
	}
	for _, text := range []string{
		"x", "\x00", first[:len(first)-1], first + "x\x00",
		record("main", "", "", "", "0", "", "", "0", ""), record(hashA, "x", "", "", "0", "", "", "0", ""), record(hashA, "", "", "", "", "", "", "0", ""),
		record(hashA, strings.Repeat(hashB+" ", maxParents+1), "", "", "0", "", "", "0", ""),
	} {
		if c, err := parseLog([]byte(text), false); !errors.Is(err, ErrOutput) {
			t.Errorf("%.60q: %+v, %v", text, c, err)
		}
	}
}

func TestParseBranches(t *testing.T) {
	line := func(fields ...string) string { return strings.Join(fields, "\x00") + "\n" }
	text := line("refs/heads/main", hashA, "refs/remotes/origin/main", "*", "") + line("refs/remotes/origin/HEAD", hashA, "", " ", "refs/remotes/origin/main") +
		line("refs/remotes/origin/main", hashB, "", " ", "")
	want := []Branch{{Name: "main", Commit: hashA, Upstream: "origin/main", Current: true}, {Name: "origin/main", Remote: true, Commit: hashB}}
	got, err := parseBranches([]byte(text), false)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for _, text := range []string{"x", "x\n", text[:len(text)-1], line("refs/tags/v1", hashA, "", " ", ""), line("refs/heads/a", "x", "", " ", ""), line("", hashA, "", " ", "")} {
		if b, err := parseBranches([]byte(text), false); !errors.Is(err, ErrOutput) {
			t.Errorf("%q: %+v, %v", text, b, err)
		}
	}
}

func TestParsePush(t *testing.T) {
	text := "To https://example.com/shop.git\n*\trefs/heads/cart:refs/heads/cart\t[new branch]\nbranch 'cart' set up to track 'origin/cart'.\nDone\n"
	got, err := parsePush([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]PushedRef{{Ref: "refs/heads/cart", Status: PushCreated, Summary: "[new branch]"}}, got); diff != "" {
		t.Error(diff)
	}
	for _, text := range []string{"", "Done\n", "*\tx\n", "*\tx\ty\n", "?\ta:b\tc\n", "!\ta:b\t[rejected]\n", "**\ta:b\tc\n", strings.Repeat("*\ta:b\tc\n", maxPushed+1)} {
		if refs, err := parsePush([]byte(text)); !errors.Is(err, ErrOutput) {
			t.Errorf("%.40q: %+v, %v", text, refs, err)
		}
	}
}

func TestReasonsOfFailures(t *testing.T) {
	for text, want := range map[string]Reason{
		"fatal: Authentication failed for 'https://example.com/shop.git/'":                                                      AuthenticationFailed,
		"fatal: could not read Username for 'https://example.com': terminal prompts disabled":                                   AuthenticationFailed,
		"fatal: unable to access 'https://example.com/': The requested URL returned error: 403":                                 AuthenticationFailed,
		"git@example.com: Permission denied (publickey).\nfatal: Could not read from remote repository.":                        AuthenticationFailed,
		"Host key verification failed.\nfatal: Could not read from remote repository.":                                          AuthenticationFailed,
		"remote: Repository not found.\nfatal: repository 'https://example.com/shop.git/' not found":                            RepositoryNotFound,
		"fatal: 'origin' does not appear to be a git repository\nfatal: Could not read from remote repository.":                 RepositoryNotFound,
		"fatal: unable to access 'https://example.com/': Could not resolve host: example.com":                                   NetworkFailed,
		"fatal: unable to access 'https://example.com/': Failed to connect to example.com port 443":                             NetworkFailed,
		"fatal: unable to access 'https://example.com/': SSL certificate problem: self-signed certificate":                      NetworkFailed,
		"fatal: unable to access 'https://example.com/': The requested URL returned error: 503":                                 NetworkFailed,
		"error: RPC failed; curl 18 transfer closed with outstanding read data remaining\nfatal: early EOF":                     NetworkFailed,
		"ssh: Could not resolve hostname example.com: Name or service not known\nfatal: Could not read from remote repository.": NetworkFailed,
		"fatal: Remote branch none not found in upstream origin":                                                                RefNotFound,
		"fatal: couldn't find remote ref none":                                                                                  RefNotFound,
		"fatal: invalid reference: none":                                                                                        RefNotFound,
		"fatal: remote error: upload-pack: not our ref " + hashA:                                                                RefNotFound,
		"error: Server does not allow request for unadvertised object " + hashA:                                                 RefNotFound,
		"fatal: bad revision 'none'": RefNotFound,
		"error: src refspec refs/heads/x does not match any\nerror: failed to push some refs to 'x'":                                            RefNotFound,
		"fatal: destination path 'x' already exists and is not an empty directory.":                                                             TargetExists,
		"fatal: not a git repository (or any of the parent directories): .git":                                                                  NotRepository,
		"fatal: write error: No space left on device\nfatal: early EOF":                                                                         DiskFull,
		"fatal: Unable to create '/srv/.git/index.lock': File exists.":                                                                          Locked,
		"error: Your local changes to the following files would be overwritten by checkout:\n\tREADME\nAborting":                                Conflict,
		"fatal: Not possible to fast-forward, aborting.":                                                                                        Conflict,
		"fatal: a branch named 'cart' already exists":                                                                                           Conflict,
		"! [rejected] main -> main (non-fast-forward)\nerror: failed to push some refs to 'x'":                                                  PushConflict,
		"! [remote rejected] main -> main (pre-receive hook declined)\nerror: failed to push some refs to 'x'":                                  PushDenied,
		"Author identity unknown\nfatal: unable to auto-detect email address":                                                                   IdentityMissing,
		"fatal: pathspec 'x' did not match any files":                                                                                           PathNotFound,
		"remote: No space left on device\nremote: not a git repository\nfatal: unable to access 'https://example.com/': Could not resolve host": NetworkFailed,
		"fatal: something else": Failed,
		"":                      Failed,
	} {
		if got := newError(strings.Split(text, "\n"), ""); got.Reason != want {
			t.Errorf("%q: got reason %d, want %d", text, got.Reason, want)
		}
	}
	if got := newError(nil, "On branch main\nnothing to commit, working tree clean\n"); got.Reason != NothingToCommit || got.Message == "" {
		t.Errorf("got %+v", got)
	}
	if got := newError([]string{"fatal: unable to access 'https://example.com/shop.git/': no"}, ""); got.URL != "https://example.com/shop.git/" {
		t.Errorf("got %+v", got)
	}
	long := newError([]string{"fatal: " + strings.Repeat("é", 100_000)}, "")
	if len(long.Message) > maxMessage {
		t.Errorf("the message has %d bytes", len(long.Message))
	}
}

func FuzzParsers(f *testing.F) {
	f.Add([]byte("# branch.oid "+hashA+"\x001 .M N... 100644 100644 100644 "+hashA+" "+hashA+" a\x00"), true)
	f.Add([]byte("2 R. N... 100644 100644 100644 "+hashA+" "+hashA+" R100 after\x00before\x00"), false)
	f.Add([]byte("1\t0\ta\x003\t2\t\x00before\x00after\x00"), false)
	f.Add([]byte(hashA+"\x00\x00A\x00a\x001\x00A\x00a\x001\x00m\x00"), false)
	f.Add([]byte("refs/heads/main\x00"+hashA+"\x00\x00*\x00\n"), false)
	f.Add([]byte("To x\n*\ta:b\tc\nDone\n"), false)
	f.Add([]byte("remote: Counting objects: 100% (5/5), done.\rfatal: unable to access 'https://example.com/': x\n"), false)
	f.Fuzz(func(t *testing.T, data []byte, truncated bool) {
		if s, err := parseStatus(data, truncated); err == nil && (len(s.Files) > MaxFiles || s.Ahead < 0 || s.Behind < 0) {
			t.Errorf("status: %+v", s)
		}
		if d, err := parseNumstat(data, truncated); err == nil && len(d.Files) > maxDiffFiles {
			t.Errorf("numstat: %d files", len(d.Files))
		}
		if commits, err := parseLog(data, truncated); err == nil && len(commits) > MaxCommits+1 {
			t.Errorf("log: %d commits", len(commits))
		}
		if branches, err := parseBranches(data, truncated); err == nil && len(branches) > MaxBranches+1 {
			t.Errorf("branches: %d", len(branches))
		}
		if refs, err := parsePush(data); err == nil && (len(refs) == 0 || len(refs) > maxPushed) {
			t.Errorf("push: %d refs", len(refs))
		}
		m := messages{report: func(p Progress) {
			if p.Phase == "" || p.Done < 0 || p.Total < 0 || p.Total > 0 && p.Done > p.Total || p.Bytes < 0 {
				t.Errorf("progress: %+v", p)
			}
		}}
		m.add(data)
		m.flush()
		if e := newError(m.text, string(data)); len(e.Message) > maxMessage || strings.ContainsFunc(e.Message, isControl) {
			t.Errorf("message: %q", e.Message)
		}
	})
}
