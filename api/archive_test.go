package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

// archived returns the id of a new sandbox that was archived with one file, and the sandbox.
func (s *server) archived(name, content string) (string, types.Sandbox) {
	s.t.Helper()
	id := s.create(name)
	s.node.Engine.Write(sandbox.ID(id), "f", content)
	sb := must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/"+name+"/archive", map[string]any{})
	s.checkArchived(sb)
	return id, sb
}

func (s *server) checkArchived(sb types.Sandbox) {
	s.t.Helper()
	if sb.State != types.StateArchived || sb.Archived == nil {
		s.t.Fatalf("it is %s, its archive is %+v", sb.State, sb.Archived)
	}
	if files := s.node.Engine.Files(sandbox.ID(sb.ID)); files != nil {
		s.t.Errorf("it has a container with %v", files)
	}
}

func TestArchiveThroughTheAPI(t *testing.T) {
	s := newServer(t, Limits{})
	id, sb := s.archived("shop", "content")
	if sb.StateReason != types.StateReasonRequested || sb.Archived.SizeBytes != 7 {
		t.Errorf("archived %+v, %+v", sb, sb.Archived)
	}
	b := sb.Archived.BackupID
	testkit.Diff(t, "the backups", s.backups("/sandbox/shop/backups"), []string{b})
	again := must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/shop/archive", map[string]any{})
	testkit.Diff(t, "the second archive", again, sb)
	list := must[types.SandboxList](s, http.StatusOK, "GET", "/sandbox?state=archived", nil).Sandboxes
	if len(list) != 1 || list[0].Archived == nil || list[0].Archived.BackupID != b {
		t.Errorf("the list is %+v", list)
	}
	if p := s.refused(problem.BackupInUse, "DELETE", "/backups/"+b, nil); !strings.Contains(p.Detail, "wake or destroy") {
		t.Errorf("the detail is %q", p.Detail)
	}

	sb = must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/shop/wake", nil)
	if sb.State != types.StateRunning || sb.Archived != nil {
		t.Errorf("woken %+v", sb)
	}
	s.checkFile(id, "content")
	s.eventually("the archive is deleted", func() bool { return len(s.backups("/backups")) == 0 })

	var events []string
	for _, e := range must[types.EventList](s, http.StatusOK, "GET", "/sandbox/shop/events", nil).Events {
		if e.Backup != "" {
			events = append(events, fmt.Sprintf("%s %s %d %d %s %t", e.Type, e.Backup, e.Bytes, e.StoredBytes, e.Reason, e.DurationMS > 0))
		}
	}
	testkit.Diff(t, "the events", events, []string{"archived " + b + " 7 7 requested true", "retrieved " + b + " 7 0  true"})
}

func TestDestroyDeletesTheArchive(t *testing.T) {
	s := newServer(t, Limits{})
	s.archived("shop", "content")
	if got := s.do("DELETE", "/sandbox/shop", nil); got.status != http.StatusNoContent {
		t.Fatalf("delete: %d %s", got.status, got.body)
	}
	s.eventually("the archive is deleted", func() bool { return len(s.backups("/backups")) == 0 })
}

func TestArchiveStreamsProgress(t *testing.T) {
	s := newServer(t, Limits{MaxStreams: 1})
	id := s.create("shop")
	s.node.Engine.Write(sandbox.ID(id), "f", "content")
	release := s.node.Backups.Block("create")
	defer release()
	stream := s.open("POST", "/sandbox/shop/archive", map[string]any{"stream": true})
	stream.expectProgress(types.BackupPhaseUpload, 7)
	s.refused(problem.StreamLimitExceeded, "POST", "/sandbox/shop/archive", map[string]any{"stream": true})
	release()
	s.checkArchived(expectComplete[types.Sandbox](stream))
}

func TestArchiveContinuesWithoutItsClient(t *testing.T) {
	for _, streamed := range []bool{false, true} {
		t.Run(fmt.Sprintf("stream %t", streamed), func(t *testing.T) {
			s := newServer(t, Limits{})
			id := s.create("shop")
			release := s.node.Backups.Block("create")
			defer release()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			req := s.request(ctx, "POST", "/sandbox/shop/archive", map[string]any{"stream": streamed})
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				s.api.ServeHTTP(httptest.NewRecorder(), req)
			}()
			s.node.Backups.AwaitBlocked(t, "create")
			cancel() // as the server does when the client disconnects
			testkit.Closed(t, "the request ends", ended)
			if state := s.state(id); state != sandbox.StateStopped {
				t.Fatalf("during the upload it is %s", state)
			}
			release()
			s.eventually("it is archived", func() bool { return s.state(id) == sandbox.StateArchived })
		})
	}
}

func TestArchiveOfASandboxInUseIsForced(t *testing.T) {
	s := newServer(t, Limits{})
	id := sandbox.ID(s.create("shop"))
	lease, err := s.node.Manager.Acquire(t.Context(), id, sandbox.CauseExec)
	testkit.NoError(t, "Acquire", err)
	defer lease.Release()
	if p := s.refused(problem.SandboxBusy, "POST", "/sandbox/shop/archive", map[string]any{}); !strings.Contains(p.Detail, "force=true") {
		t.Errorf("the detail is %q", p.Detail)
	}
	if state := s.state(string(id)); state != sandbox.StateRunning {
		t.Errorf("it is %s", state)
	}
	sb := must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/shop/archive?force=true", map[string]any{})
	s.checkArchived(sb)
	if sb.StateReason != types.StateReasonForced {
		t.Errorf("the reason is %s", sb.StateReason)
	}
}

func TestFailedArchiveHasACode(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("shop")
	s.node.Engine.Write(sandbox.ID(id), "f", "content")
	s.node.Backups.FailOnce("create", &sandbox.ObjectStoreError{Failure: sandbox.ObjectStoreDenied, Err: errors.New("access denied")})
	s.refused(problem.ObjectStoreFailed, "POST", "/sandbox/shop/archive", map[string]any{})
	s.node.Backups.FailOnce("create", fmt.Errorf("%w (10000)", sandbox.ErrTooManyBackups))
	s.refused(problem.BackupLimitExceeded, "POST", "/sandbox/shop/archive", map[string]any{})
	s.node.Backups.FailOnce("create", fmt.Errorf(`%w: "a/b" has too many entries`, sandbox.ErrBackupUnsupported))
	s.refused(problem.BackupUnsupported, "POST", "/sandbox/shop/archive", map[string]any{})
	if p := s.refused(problem.RequestInvalid, "POST", "/sandbox/shop/archive", `{"force":true}`); !strings.Contains(p.Detail, "body.force: unknown field") {
		t.Errorf("the detail is %q", p.Detail)
	}
	s.refused(problem.SandboxNotFound, "POST", "/sandbox/none/archive", map[string]any{})
	if state := s.state(id); state != sandbox.StateStopped {
		t.Errorf("it is %s", state)
	}
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/shop/wake", nil)
	s.checkFile(id, "content")
}

// An archived sandbox whose disk cannot be downloaded stays archived.
func TestFailedRetrievalHasACode(t *testing.T) {
	s := newServer(t, Limits{})
	id, sb := s.archived("shop", "content")
	for _, tc := range []struct {
		failure sandbox.ObjectStoreFailure
		code    problem.Code
	}{
		{sandbox.ObjectStoreUnreachable, problem.ObjectStoreFailed}, {sandbox.ObjectStoreDamaged, problem.BackupUnreadable},
	} {
		for path, body := range map[string]any{"wake": nil, "exec": map[string]any{"command": "true"}, "snapshot": map[string]any{}, "fork": map[string]any{"count": 1}, "backup": map[string]any{}} {
			s.node.Backups.FailOnce("restore", &sandbox.ObjectStoreError{Failure: tc.failure, Err: errors.New("status 500")})
			s.refused(tc.code, "POST", "/sandbox/shop/"+path, body)
		}
	}
	s.node.Backups.RebuildImage()
	if p := s.refused(problem.ImageMismatch, "POST", "/sandbox/shop/wake", nil); !strings.Contains(p.Detail, "restore the backup with allow_other_image") {
		t.Errorf("the detail is %q", p.Detail)
	}
	if state := s.state(id); state != sandbox.StateArchived {
		t.Errorf("it is %s", state)
	}
	restored := must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/shop/restore", map[string]any{"backup_id": sb.Archived.BackupID, "allow_other_image": true})
	if restored.State != types.StateStopped || restored.Archived != nil {
		t.Errorf("restored %+v", restored)
	}
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/shop/wake", nil)
	s.checkFile(id, "content")
}

func TestArchiveAfterIsASetting(t *testing.T) {
	s := newServer(t, Limits{})
	sb := must[types.Sandbox](s, http.StatusCreated, "POST", "/sandbox", map[string]any{"name": "shop", "archive_after": "720h"})
	if time.Duration(sb.ArchiveAfter) != 720*time.Hour {
		t.Errorf("archive_after is %v", sb.ArchiveAfter)
	}
	if p := s.refused(problem.RequestInvalid, "PATCH", "/sandbox/shop", map[string]any{"archive_after": "10ms"}); !strings.Contains(p.Detail, "archive_after") {
		t.Errorf("the detail is %q", p.Detail)
	}
	for _, after := range []time.Duration{0, time.Second} {
		sb = must[types.Sandbox](s, http.StatusOK, "PATCH", "/sandbox/shop", map[string]any{"archive_after": after.String()})
		if time.Duration(sb.ArchiveAfter) != after {
			t.Errorf("archive_after is %v, not %v", sb.ArchiveAfter, after)
		}
	}
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/shop/stop", nil)
	s.eventually("it is archived", func() bool { return s.state(sb.ID) == sandbox.StateArchived })
	if sb = must[types.Sandbox](s, http.StatusOK, "GET", "/sandbox/shop", nil); sb.StateReason != types.StateReasonArchiveAfter {
		t.Errorf("the reason is %s", sb.StateReason)
	}
}

func TestNodeWithoutAnObjectStoreRefusesToArchive(t *testing.T) {
	node := sandboxtest.Open(t, nil)
	archived, _, err := node.Manager.Create(t.Context(), sandbox.CreateRequest{Owner: testOwner, Name: "archived"})
	testkit.NoError(t, "Create", err)
	_, err = node.Manager.Archive(t.Context(), archived.ID, false, nil)
	testkit.NoError(t, "Archive", err)
	testkit.NoError(t, "Close", node.Manager.Close(context.Background()))
	node.Backups = nil
	node.Restart(t)
	s := newServerOn(t, node, Limits{})
	s.http.Start()
	id := s.create("shop")
	s.refused(problem.ObjectStoreRequired, "POST", "/sandbox/shop/archive", map[string]any{})
	s.refused(problem.ObjectStoreRequired, "POST", "/sandbox/archived/wake", nil)
	if state := s.state(id); state != sandbox.StateRunning {
		t.Errorf("it is %s", state)
	}
}

// A request waits for the download as long as for any wake. The download goes on after that.
func TestDownloadOutlivesTheRequest(t *testing.T) {
	node := sandboxtest.Open(t, func(cfg *sandbox.Config) { cfg.WakeTimeout = 100 * time.Millisecond })
	s := newServerOn(t, node, Limits{})
	s.http.Start()
	id, _ := s.archived("shop", "content")
	release := s.node.Backups.Block("restore")
	defer release()
	if p := s.refused(problem.WakeFailed, "POST", "/sandbox/shop/wake", nil); !strings.Contains(p.Detail, "being downloaded from the object store") || !strings.Contains(p.Detail, "; try again; ") {
		t.Errorf("the detail is %q", p.Detail)
	}
	release()
	s.eventually("the disk is on the node", func() bool { return s.state(id) == sandbox.StateStopped })
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/shop/wake", nil)
	s.checkFile(id, "content")
}
