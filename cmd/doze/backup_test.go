package main

import (
	"errors"
	"regexp"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/testkit/testterm"
)

func TestBackupCommands(t *testing.T) {
	r := newRig(t)
	id := decodeJSON[types.Sandbox](t, r.ok("create", "shop", "--json")).ID
	r.ok("create", "other")
	r.node.Engine.Write(sandbox.ID(id), "f", "content")
	first := strings.TrimSpace(r.ok("backup", "create", "shop"))
	if !regexp.MustCompile(`^[a-z0-9]{12}$`).MatchString(first) {
		t.Errorf("create printed %q", first)
	}
	other := decodeJSON[types.Backup](t, r.ok("backup", "create", "other", "--json"))
	if out := r.ok("backup", "ls", "shop"); !regexp.MustCompile(`^ID +SANDBOX +IMAGE +TAKEN +SIZE +SENT +TOOK +PATHS\n` + first + ` +shop +base +\d+s +7 B +7 B +\S+ +/\n$`).MatchString(out) {
		t.Errorf("ls printed %q", out)
	}
	all := decodeJSON[types.BackupList](t, r.ok("backup", "ls", "--json"))
	testkit.Diff(t, "all backups", texts(all.Backups, func(b types.Backup) string { return b.ID }), []string{other.ID, first})

	r.node.Engine.Write(sandbox.ID(id), "f", "changed")
	if out := r.ok("backup", "restore", "shop", first); out != "shop  running\n" {
		t.Errorf("restore printed %q", out)
	}
	testkit.Diff(t, "the files", r.node.Engine.Files(sandbox.ID(id)), map[string]string{"f": "content"})

	second := strings.TrimSpace(r.ok("backup", "create", "shop", "--keep-last", "1"))
	r.refused("backup_not_found: ", "backup", "restore", "shop", first)
	r.refused("request_invalid: ", "backup", "create", "shop", "--keep-last", "-1")
	if out := r.ok("history", "shop"); !regexp.MustCompile(`(?s) backed_up +\S+ +7 B +backup ` + first + `, 7 B sent\n.* restored +\S+ +\S+( \S+)? +backup ` + first + `\n.* backup_deleted +- +7 B +retention, backup ` + first + `\n`).MatchString(out) {
		t.Errorf("history printed %s", out)
	}
	if out := r.ok("backup", "rm", second, other.ID); out != second+"  deleted\n"+other.ID+"  deleted\n" {
		t.Errorf("rm printed %q", out)
	}
	r.refused("backup_not_found: ", "backup", "rm", second)
	r.misused("BACKUP is missing", "backup", "restore", "shop")
}

func TestBackupOfPaths(t *testing.T) {
	r := newRig(t)
	id := sandbox.ID(decodeJSON[types.Sandbox](t, r.ok("create", "shop", "--json")).ID)
	for _, name := range []string{"f", "g", "a.log", ".git", "ignored"} {
		r.node.Engine.Write(id, name, "content")
	}
	r.node.Engine.Write(id, ".gitignore", "ignored\n")
	b := decodeJSON[types.Backup](t, r.ok("backup", "create", "shop", "--path", "/srv/f", "--path", "/srv/g", "--json"))
	testkit.Diff(t, "paths", b.Paths, []string{"/srv/f", "/srv/g"})
	if out := r.ok("backup", "ls", "shop"); !regexp.MustCompile(` /srv/f and 1 more\n$`).MatchString(out) {
		t.Errorf("ls printed %q", out)
	}
	r.node.Engine.Write(id, "f", "changed")
	r.node.Engine.Write(id, "a.log", "changed")
	r.ok("backup", "restore", "shop", b.ID)
	if files := r.node.Engine.Files(id); files["f"] != "content" || files["a.log"] != "changed" {
		t.Errorf("the files are %q", files)
	}
	whole := strings.TrimSpace(r.ok("backup", "create", "shop", "--exclude", "*.log", "--exclude", "/srv/g", "--gitignore"))
	r.ok("backup", "restore", "shop", whole)
	testkit.Diff(t, "the files", r.node.Engine.Files(id), map[string]string{"f": "content", ".git": "content", ".gitignore": "ignored\n"})
	r.refused("request_invalid: ", "backup", "create", "shop", "--path", "srv")
	r.refused("request_invalid: ", "backup", "create", "shop", "--path", "/srv/none")
	r.refused("request_invalid: ", "backup", "create", "shop", "--exclude", "[a")
}

func TestRestoreOfABackupIsForced(t *testing.T) {
	r := newRig(t)
	id := sandbox.ID(decodeJSON[types.Sandbox](t, r.ok("create", "shop", "--json")).ID)
	r.node.Engine.Write(id, "f", "content")
	b := strings.TrimSpace(r.ok("backup", "create", "shop"))
	r.node.Engine.Write(id, "f", "changed")
	lease, err := r.node.Manager.Acquire(t.Context(), id, sandbox.CauseExec)
	testkit.NoError(t, "Acquire", err)
	defer lease.Release()
	r.node.Backups.RebuildImage()
	r.refused("image_mismatch: ", "backup", "restore", "shop", b, "--force")
	r.refused("sandbox_busy: ", "backup", "restore", "shop", b, "--allow-other-image")
	testkit.Diff(t, "the files", r.node.Engine.Files(id), map[string]string{"f": "changed"})
	r.ok("backup", "restore", "shop", b, "--allow-other-image", "--force")
	testkit.Diff(t, "the files", r.node.Engine.Files(id), map[string]string{"f": "content"})
}

func TestFailedBackupNamesTheCause(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	r.node.Backups.FailOnce("create", &sandbox.ObjectStoreError{Failure: sandbox.ObjectStoreDenied, Err: errors.New("access denied")})
	r.refused("object_store_failed: the object store refuses the node's credentials: access denied; ", "backup", "create", "shop")
	if out := r.ok("history", "shop"); !strings.Contains(out, "backup_failed") || !strings.Contains(out, "access denied") {
		t.Errorf("history printed %s", out)
	}
}

func TestBackupShowsItsProgressOnATerminal(t *testing.T) {
	r := newRig(t)
	id := decodeJSON[types.Sandbox](t, r.ok("create", "shop", "--json")).ID
	r.node.Engine.Write(sandbox.ID(id), "f", strings.Repeat("content", 1<<10))
	release := r.node.Backups.Block("create")
	defer release()
	term := testterm.New(t, 80, 24)
	r.start(term, "backup", "create", "shop")
	term.AwaitText("it shows the upload", "uploading: 0% (0 B/7.0 KiB), 0/2 files")
	release()
	term.ExpectExit(0)
	term.Await("the line made way", func(s testterm.Screen) bool { return s.Matches(`\A[a-z0-9]{12}\n\z`) })
	term.ExpectRestored()

	b := decodeJSON[types.BackupList](t, r.ok("backup", "ls", "--json")).Backups[0].ID
	release = r.node.Backups.Block("restore")
	defer release()
	term = testterm.New(t, 80, 24)
	r.start(term, "backup", "restore", "shop", b)
	term.AwaitText("it shows the download", "downloading: 0% (0 B/7.0 KiB), 0/2 files")
	release()
	term.ExpectExit(0)
	term.AwaitText("the line made way", "shop  running")
	term.ExpectRestored()
}

// The backup of an interrupted command is complete later.
func TestInterruptedBackupContinues(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	release := r.node.Backups.Block("create")
	defer release()
	term := testterm.New(t, 80, 24)
	r.start(term, "backup", "create", "shop")
	r.node.Backups.AwaitBlocked(t, "create")
	term.Press("\x03")
	term.ExpectExit(exitInterrupted)
	release()
	testkit.Eventually(t, "the backup is complete", func() bool {
		return len(decodeJSON[types.BackupList](t, r.ok("backup", "ls", "--json")).Backups) == 1
	})
}

func TestBackupProgressLine(t *testing.T) {
	for want, p := range map[string]types.BackupProgress{
		"copying the disk": {Phase: types.BackupPhaseSnapshot},
		"uploading: 45% (106.2 MiB/236.0 MiB), 9120/20201 files": {Phase: types.BackupPhaseUpload, Bytes: 111358772, TotalBytes: 236 << 20, Entries: 9120, TotalEntries: 20201},
		"downloading: 1.2 MiB":                    {Phase: types.BackupPhaseDownload, Bytes: 1258291},
		"uploading: 100% (1024.0 PiB/1024.0 PiB)": {Phase: types.BackupPhaseUpload, Bytes: 1 << 60, TotalBytes: 1 << 60},
		"verifying":            {Phase: "verifying"}, // of a later version
		"uploading, 1/1 files": {Phase: types.BackupPhaseUpload, Entries: 1, TotalEntries: 1},
	} {
		if got := backupProgress(p); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestBackupsAreCompleted(t *testing.T) {
	r := newRig(t)
	r.ok("create", "shop")
	b := strings.TrimSpace(r.ok("backup", "create", "shop"))
	for line, want := range map[string]string{
		"backup create sh": "shop :4", "backup ls sh": "shop :4", "backup restore sh": "shop :4", "backup restore shop " + b[:3]: b + " :4", "backup rm " + b[:3]: b + " :4",
		"backup create shop sh": ":4",
	} {
		out := r.ok(append([]string{"__completeNoDesc"}, strings.Fields(line)...)...)
		if got := strings.Join(strings.Fields(out), " "); got != want {
			t.Errorf("completing %q: got %q, want %q", line, got, want)
		}
	}
}
