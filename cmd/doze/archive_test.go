package main

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/testkit/testterm"
)

func TestArchiveCommand(t *testing.T) {
	r := newRig(t)
	id := sandbox.ID(decodeJSON[types.Sandbox](t, r.ok("create", "shop", "--archive-after", "720h", "--json")).ID)
	r.ok("create", "other")
	r.node.Engine.Write(id, "f", "content")
	if out := r.ok("archive", "shop", "other"); out != "shop  archived\nother  archived\n" {
		t.Errorf("archive printed %q", out)
	}
	b := decodeJSON[types.Sandbox](t, r.ok("show", "shop", "--json")).Archived.BackupID
	if out := r.ok("show", "shop"); !regexp.MustCompile(`(?m)^state +archived for \d+s \(requested\)\n(.*\n)*archives after +720h\narchive +backup ` + b + `, 7 B\n`).MatchString(out) {
		t.Errorf("show printed %s", out)
	}
	if out := r.ok("ls", "-q", "--state", "archived"); out != "other\nshop\n" {
		t.Errorf("ls printed %q", out)
	}
	if out := r.ok("top"); !strings.Contains(out, "2 archived") {
		t.Errorf("top printed %s", out)
	}
	r.refused("backup_in_use: ", "backup", "rm", b)

	if out := r.ok("wake", "shop"); out != "shop  running\n" {
		t.Errorf("wake printed %q", out)
	}
	testkit.Diff(t, "the files", r.node.Engine.Files(id), map[string]string{"f": "content"})
	if out := r.ok("history", "shop"); !regexp.MustCompile(`(?s) archived +\S+ +7 B +requested, backup ` + b + `, 7 B sent\n.* retrieved +\S+ +7 B +backup ` + b + `\n`).MatchString(out) {
		t.Errorf("history printed %s", out)
	}
	sb := decodeJSON[types.Sandbox](t, r.ok("update", "shop", "--archive-after", "1h", "--json"))
	if time.Duration(sb.ArchiveAfter) != time.Hour {
		t.Errorf("archive_after is %v", sb.ArchiveAfter)
	}
	r.misused("SANDBOX is missing", "archive")
}

func TestArchiveOffersForce(t *testing.T) {
	r := newRig(t)
	id := sandbox.ID(decodeJSON[types.Sandbox](t, r.ok("create", "shop", "--json")).ID)
	lease, err := r.node.Manager.AcquireRunning(id)
	testkit.NoError(t, "AcquireRunning", err)
	defer lease.Release()
	r.refused("\n  use --force: ", "archive", "shop")
	if out := r.ok("archive", "--force", "shop"); out != "shop  archived\n" {
		t.Errorf("archive --force printed %q", out)
	}
}

func TestArchiveShowsItsProgressOnATerminal(t *testing.T) {
	r := newRig(t)
	id := sandbox.ID(decodeJSON[types.Sandbox](t, r.ok("create", "shop", "--json")).ID)
	r.node.Engine.Write(id, "f", strings.Repeat("content", 1<<10))
	release := r.node.Backups.Block("create")
	defer release()
	term := testterm.New(t, 80, 24)
	r.start(term, "archive", "shop")
	term.AwaitText("it shows the upload", "uploading: 0% (0 B/7.0 KiB), 0/2 files")
	release()
	term.ExpectExit(0)
	term.AwaitText("the line made way", "shop  archived")
	term.ExpectRestored()
}
