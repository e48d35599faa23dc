package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/sandboxtest"
	"github.com/doze-run/doze/testkit"
)

func (s *server) backUp(name string, more ...any) types.Backup {
	s.t.Helper()
	body := map[string]any{}
	for i := 0; i < len(more); i += 2 {
		body[more[i].(string)] = more[i+1]
	}
	return must[types.Backup](s, http.StatusCreated, "POST", "/sandbox/"+name+"/backup", body)
}

func (s *server) backups(path string) (ids []string) {
	s.t.Helper()
	for _, b := range must[types.BackupList](s, http.StatusOK, "GET", path, nil).Backups {
		ids = append(ids, b.ID)
	}
	return ids
}

// restore restores a backup, and expects the sandbox to have one file with that content.
func (s *server) restore(name, backup, content string) types.Sandbox {
	s.t.Helper()
	sb := must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/"+name+"/restore", map[string]any{"backup_id": backup})
	s.checkFile(sb.ID, content)
	return sb
}

func (s *server) checkFile(id, content string) {
	s.t.Helper()
	testkit.Diff(s.t, "the files of "+id, s.node.Engine.Files(sandbox.ID(id)), map[string]string{"f": content})
}

func TestBackupsThroughTheAPI(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("shop")
	other := s.create("other")
	s.node.Engine.Write(sandbox.ID(id), "f", "before")
	s.node.Engine.Write(sandbox.ID(other), "f", "other")
	s.sleep(id)
	got := s.do("POST", "/sandbox/shop/backup", map[string]any{})
	if got.status != http.StatusCreated || got.header.Get("Content-Type") != "application/json" {
		t.Fatalf("status %d: %s", got.status, got.body)
	}
	b := must[types.Backup](s, http.StatusOK, "GET", strings.TrimPrefix(got.header.Get("Location"), Prefix), nil)
	if b.Sandbox != id || b.SandboxName != "shop" || b.Image != "base" || b.CreatedAt.IsZero() || b.SizeBytes != 6 || b.Entries != 2 || b.StoredBytes != 6 {
		t.Errorf("backup %+v", b)
	}
	if state := s.state(id); state != sandbox.StateAsleep {
		t.Errorf("the backup made the sandbox %s", state)
	}
	second := s.backUp("other")
	testkit.Diff(t, "all backups", s.backups("/backups"), []string{second.ID, b.ID})
	testkit.Diff(t, "the backups of shop", s.backups("/sandbox/shop/backups"), []string{b.ID})

	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/shop/wake", nil)
	s.node.Engine.Write(sandbox.ID(id), "f", "after")
	if sb := s.restore("shop", b.ID, "before"); sb.State != types.StateRunning {
		t.Errorf("restored %+v", sb)
	}
	s.restore("shop", second.ID, "other") // of another sandbox
	if got := s.do("DELETE", "/sandbox/other", nil); got.status != http.StatusNoContent {
		t.Fatalf("delete: %d %s", got.status, got.body)
	}
	s.restore("shop", second.ID, "other") // of a destroyed one

	if got := s.do("DELETE", "/backups/"+b.ID, nil); got.status != http.StatusNoContent {
		t.Errorf("delete: %d %s", got.status, got.body)
	}
	for _, method := range []string{"GET", "DELETE"} {
		s.refused(problem.BackupNotFound, method, "/backups/"+b.ID, nil)
	}
	s.refused(problem.BackupNotFound, "POST", "/sandbox/shop/restore", map[string]any{"backup_id": b.ID})
	s.checkFile(id, "other")

	var events []string
	for _, e := range must[types.EventList](s, http.StatusOK, "GET", "/sandbox/shop/events", nil).Events {
		if e.Backup != "" {
			events = append(events, fmt.Sprintf("%s %s %d %s", e.Type, e.Backup, e.StoredBytes, e.Reason))
		}
	}
	testkit.Diff(t, "the events", events, []string{
		"backed_up " + b.ID + " 6 ", "restored " + b.ID + " 0 ", "restored " + second.ID + " 0 ", "restored " + second.ID + " 0 ", "backup_deleted " + b.ID + " 0 requested",
	})
}

func TestBackupsHavePages(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("shop")
	all := []string{s.backUp("shop").ID, s.backUp("shop").ID, s.backUp("shop").ID}
	slices.Reverse(all)
	for _, path := range []string{"/backups", "/sandbox/shop/backups"} {
		first := must[types.BackupList](s, http.StatusOK, "GET", path+"?limit=2", nil)
		if len(first.Backups) != 2 || first.NextCursor != all[1] {
			t.Errorf("%s: first page %+v", path, first)
		}
		testkit.Diff(t, "the second page of "+path, s.backups(path+"?limit=2&cursor="+first.NextCursor), all[2:])
		if last := must[types.BackupList](s, http.StatusOK, "GET", path+"?limit=1&cursor="+all[1], nil); last.NextCursor != "" {
			t.Errorf("%s: last page %+v", path, last)
		}
		if empty := s.do("GET", path+"?cursor="+all[2], nil); !strings.Contains(string(empty.body), `"backups":[]`) {
			t.Errorf("%s: after the last %s", path, empty.body)
		}
		if p := s.refused(problem.RequestInvalid, "GET", path+"?cursor=aaaaaaaaaaaa", nil); !strings.Contains(p.Detail, "query.cursor") {
			t.Errorf("%s: %s", path, p.Detail)
		}
		s.refused(problem.RequestInvalid, "GET", path+"?limit=0", nil)
	}
}

func TestBackupsToKeepStay(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("shop")
	s.create("other")
	other := s.backUp("other").ID
	first, second := s.backUp("shop"), s.backUp("shop")
	third := s.backUp("shop", "keep_last", 2)
	testkit.Diff(t, "the backups", s.backups("/backups"), []string{third.ID, second.ID, other})
	s.refused(problem.BackupNotFound, "GET", "/backups/"+first.ID, nil)
}

func TestBackupOfPathsNamesThem(t *testing.T) {
	s := newServer(t, Limits{})
	id := sandbox.ID(s.create("shop"))
	s.node.Engine.Write(id, "f", "content")
	s.node.Engine.Write(id, "g", "content")
	whole := s.backUp("shop")
	b := s.backUp("shop", "paths", []string{"/srv/f"}, "excludes", []string{"*.log"}, "gitignore", true)
	if whole.Paths != nil || whole.Excludes != nil || whole.Gitignore {
		t.Errorf("the backup of the disk is %+v", whole)
	}
	testkit.Diff(t, "the paths", b.Paths, []string{"/srv/f"})
	testkit.Diff(t, "the excludes", b.Excludes, []string{"*.log"})
	if !b.Gitignore {
		t.Error("gitignore is missing")
	}
	testkit.Diff(t, "the backup", must[types.Backup](s, http.StatusOK, "GET", "/backups/"+b.ID, nil), b)
	s.node.Engine.Write(id, "f", "changed")
	s.node.Engine.Write(id, "g", "changed")
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/shop/restore", map[string]any{"backup_id": b.ID})
	testkit.Diff(t, "the files", s.node.Engine.Files(id), map[string]string{"f": "content", "g": "changed"})
}

func TestBadBackupRequestsAreRefused(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("shop")
	s.node.Engine.Write(sandbox.ID(id), "f", "content")
	b := s.backUp("shop").ID
	must[types.Snapshot](s, http.StatusCreated, "POST", "/sandbox/shop/snapshot", map[string]any{"name": "before"})
	s.node.Engine.Write(sandbox.ID(id), "f", "changed")
	for _, tc := range []struct{ route, body, location, says string }{
		{"backup", `{"keep_last":-1}`, "body.keep_last", "0"},
		{"backup", `{"keep_last":10001}`, "body.keep_last", "10000"},
		{"backup", `{"max_age":"1h"}`, "body.max_age", "the fields are excludes, gitignore, keep_last, paths, stream"},
		{"backup", `{"paths":["srv"]}`, "body.paths[0]", "begin it with a slash, such as /srv/app"},
		{"backup", `{"paths":["/srv/none"]}`, "body.paths", `"/srv/none" does not exist; name files and folders that exist`},
		{"backup", `{"paths":["/srv/f","/dev/shm"]}`, "body.paths[1]", `"/dev/shm" is not on the disk`},
		{"backup", `{"paths":[` + strings.Repeat(`"/a",`, 100) + `"/a"]}`, "body.paths", "100"},
		{"backup", `{"excludes":["[a"]}`, "body.excludes[0]", `"[a" has a bracket that is not closed; use the syntax of .gitignore`},
		{"restore", `{}`, "body.snapshot_id", "missing, as is backup_id; send either snapshot_id or backup_id"},
		{"restore", `{"snapshot_id":"","backup_id":""}`, "body.snapshot_id", "send either"},
		{"restore", `{"stream":true}`, "body.snapshot_id", "send either"},
		{"restore", `{"snapshot_id":"before","backup_id":"` + b + `"}`, "body.backup_id", "both snapshot_id and backup_id are given; send either"},
		{"restore", `{"snapshot_id":"before","allow_other_image":true}`, "body.allow_other_image", "send backup_id in place of snapshot_id"},
		{"restore", `{"snapshot_id":"before","stream":true}`, "body.stream", "send backup_id in place of snapshot_id"},
		{"restore", `{"backup_id":"` + b + `","force":true}`, "body.force", "unknown field"},
	} {
		p := s.refused(problem.RequestInvalid, "POST", "/sandbox/shop/"+tc.route, tc.body)
		if len(p.Errors) != 1 || p.Errors[0].Location != tc.location || !strings.Contains(p.Detail, tc.says) {
			t.Errorf("%s %s: %+v", tc.route, tc.body, p)
		}
	}
	for _, route := range []string{"backup", "restore"} {
		s.refused(problem.SandboxNotFound, "POST", "/sandbox/none/"+route, map[string]any{})
	}
	s.refused(problem.SandboxNotFound, "GET", "/sandbox/none/backups", nil)
	s.checkFile(id, "changed")
	testkit.Diff(t, "the backups", s.backups("/backups"), []string{b})
}

// expectProgress reads events until one has all of the content.
func (e *events) expectProgress(phase types.BackupPhase, bytes int64) {
	e.t.Helper()
	for {
		p := parse[types.BackupProgress](e.t, e.expect("progress"))
		if p.Phase == phase && p.TotalBytes == bytes && p.TotalEntries == 2 {
			return
		}
	}
}

// expectComplete skips progress.
func expectComplete[T any](e *events) T {
	e.t.Helper()
	for {
		ev, ok := e.next()
		if !ok {
			e.t.Fatal("the stream ended without complete")
		}
		switch ev.name {
		case ":", "progress":
		case "complete":
			e.expectEnd()
			return parse[T](e.t, ev)
		default:
			e.t.Fatalf("event %s %s", ev.name, ev.data)
		}
	}
}

func TestBackupsStreamProgress(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("shop")
	s.node.Engine.Write(sandbox.ID(id), "f", "content")
	release := s.node.Backups.Block("create")
	defer release()
	stream := s.open("POST", "/sandbox/shop/backup", map[string]any{"stream": true})
	stream.expectProgress(types.BackupPhaseUpload, 7)
	release()
	b := expectComplete[types.Backup](stream)
	testkit.Diff(t, "the backups", s.backups("/backups"), []string{b.ID})

	s.node.Engine.Write(sandbox.ID(id), "f", "changed")
	release = s.node.Backups.Block("restore")
	defer release()
	stream = s.open("POST", "/sandbox/shop/restore", map[string]any{"backup_id": b.ID, "stream": true})
	stream.expectProgress(types.BackupPhaseDownload, 7)
	s.checkFile(id, "changed") // the sandbox goes on
	release()
	if sb := expectComplete[types.Sandbox](stream); sb.ID != id || sb.State != types.StateRunning {
		t.Errorf("restored %+v", sb)
	}
	s.checkFile(id, "content")

	stream = s.open("POST", "/sandbox/shop/restore", map[string]any{"backup_id": "aaaaaaaaaaaa", "stream": true})
	if p := parse[problem.Problem](t, stream.expect("problem")); p.Code != problem.BackupNotFound || p.RequestID == "" {
		t.Errorf("got %+v", p)
	}
	stream.expectEnd()
}

func TestStreamsOfBackupsAreLimited(t *testing.T) {
	s := newServer(t, Limits{MaxStreams: 1})
	s.create("shop")
	b := s.backUp("shop").ID
	defer s.node.Backups.Block("create")()
	defer s.open("POST", "/sandbox/shop/backup", map[string]any{"stream": true}).close()
	s.refused(problem.StreamLimitExceeded, "POST", "/sandbox/shop/backup", map[string]any{"stream": true})
	s.refused(problem.StreamLimitExceeded, "POST", "/sandbox/shop/restore", map[string]any{"backup_id": b, "stream": true})
}

// serveReports responds with the progress of a backup that reports so many times.
func (s *server) serveReports(w http.ResponseWriter, r *http.Request, reports int64, ended func()) {
	c := newCall(w, r)
	defer c.done()
	r = c.withContext(r)
	response, err := respondProgress(r.Context(), s.api, Exchange{r, w}, func(_ context.Context, progress func(sandbox.BackupProgress)) (types.Backup, error) {
		defer ended()
		for i := range reports {
			progress(sandbox.BackupProgress{Phase: sandbox.BackupUpload, Done: sandbox.DiskUsage{Bytes: i + 1}})
		}
		return types.Backup{ID: "b4n8r2t6w9xz"}, nil
	})
	if err != nil {
		s.t.Error(err)
		return
	}
	response.Body(nil)
}

// The last event of progress has all of the content, also if the result is ready at the same time.
func TestLastProgressIsSent(t *testing.T) {
	s := newServer(t, Limits{})
	for range 100 {
		w := httptest.NewRecorder()
		s.serveReports(w, httptest.NewRequest(http.MethodPost, "/", nil), 3, func() {})
		_, last, _ := strings.Cut(w.Body.String(), `"bytes":3,`)
		if !strings.Contains(last, "event: complete\n") {
			t.Fatalf("got %s", w.Body)
		}
	}
}

// The progress of a client that does not read is dropped, and the backup does not wait for it.
func TestSlowClientDelaysNoBackup(t *testing.T) {
	s := newServer(t, Limits{})
	const reports = 300_000 // more than sockets buffer
	done := make(chan struct{})
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.serveReports(w, r, reports, func() { close(done) })
	}))
	defer node.Close()
	resp, err := node.Client().Get(node.URL)
	testkit.NoError(t, "GET", err)
	defer resp.Body.Close() // also if the test fails: it ends the handler
	testkit.Closed(t, "the backup ends", done)
	text := testkit.Body(t, resp)
	// The last report and the result arrive.
	if last := fmt.Sprintf(`"bytes":%d,`, reports); !strings.Contains(text, last) || !strings.Contains(text, "event: complete\n") {
		t.Errorf("the stream ends with %q", text[max(0, len(text)-300):])
	}
}

func TestBackupContinuesWithoutItsClient(t *testing.T) {
	for _, streamed := range []bool{false, true} {
		for _, operation := range []string{"create", "restore"} {
			t.Run(fmt.Sprintf("%s, stream %t", operation, streamed), func(t *testing.T) {
				s := newServer(t, Limits{})
				id := s.create("shop")
				s.node.Engine.Write(sandbox.ID(id), "f", "content")
				path, body, before := "/sandbox/shop/backup", map[string]any{"stream": streamed}, 0
				if operation == "restore" {
					path, body["backup_id"], before = "/sandbox/shop/restore", s.backUp("shop").ID, 1
					s.node.Engine.Write(sandbox.ID(id), "f", "changed")
				}
				release := s.node.Backups.Block(operation)
				defer release()
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				req := s.request(ctx, "POST", path, body)
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					s.api.ServeHTTP(httptest.NewRecorder(), req)
				}()
				s.node.Backups.AwaitBlocked(t, operation)
				cancel() // as the server does when the client disconnects
				testkit.Closed(t, "the request ends", ended)
				if n := len(s.backups("/backups")); n != before {
					t.Fatalf("there are %d backups before the upload has ended", n)
				}
				release()
				s.eventually("the operation is complete", func() bool {
					return len(s.backups("/backups")) == 1 && s.node.Engine.Files(sandbox.ID(id))["f"] == "content"
				})
			})
		}
	}
}

func TestFailuresOfTheObjectStoreHaveCodes(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("shop")
	s.node.Engine.Write(sandbox.ID(id), "f", "content")
	b := s.backUp("shop").ID
	failed := func(kind sandbox.ObjectStoreFailure) error {
		return &sandbox.ObjectStoreError{Failure: kind, Err: errors.New("status 500 of s3.example.com")}
	}
	for _, tc := range []struct {
		err  error
		code problem.Code
		says string
	}{
		{failed(sandbox.ObjectStoreUnreachable), problem.ObjectStoreFailed, "unreachable or fails: status 500 of s3.example.com; try again"},
		{failed(sandbox.ObjectStoreDenied), problem.ObjectStoreFailed, "access_key and secret_key"},
		{failed(sandbox.ObjectStoreNoBucket), problem.ObjectStoreFailed, "does not have the bucket"},
		{failed(sandbox.ObjectStorePassword), problem.ObjectStoreFailed, "another password"},
		{failed(sandbox.ObjectStoreDamaged), problem.BackupUnreadable, "missing or damaged"},
		{failed("of a later version"), problem.ObjectStoreFailed, "unreachable or fails"},
		{&sandbox.ObjectStoreError{Failure: sandbox.ObjectStoreUnreachable, Err: fmt.Errorf("dial: %w", syscall.ECONNREFUSED)}, problem.ObjectStoreFailed, "connection refused"},
		{&sandbox.ObjectStoreError{Failure: sandbox.ObjectStoreUnreachable, Err: context.DeadlineExceeded}, problem.ObjectStoreFailed, "deadline exceeded"},
	} {
		check := func(operation, method, path string, body any) {
			t.Helper()
			s.node.Backups.FailOnce(operation, tc.err)
			if p := s.refused(tc.code, method, path, body); !strings.Contains(p.Detail, tc.says) {
				t.Errorf("%v: %s %s: the detail is %q", tc.err, method, path, p.Detail)
			}
		}
		checkStream := func(operation, path string, body map[string]any) {
			t.Helper()
			check(operation, "POST", path, body)
			body["stream"] = true
			s.node.Backups.FailOnce(operation, tc.err)
			stream := s.open("POST", path, body)
			ev, _ := stream.next()
			for ev.name == "progress" {
				ev, _ = stream.next()
			}
			if ev.name != "problem" {
				t.Fatalf("%v: %s: event %q", tc.err, path, ev.name)
			}
			if p := parse[problem.Problem](t, ev); p.Code != tc.code || !strings.Contains(p.Detail, tc.says) {
				t.Errorf("%v: %s: %+v", tc.err, path, p)
			}
			stream.expectEnd()
		}
		checkStream("create", "/sandbox/shop/backup", map[string]any{})
		checkStream("capture", "/sandbox/shop/backup", map[string]any{})
		checkStream("restore", "/sandbox/shop/restore", map[string]any{"backup_id": b})
		check("list", "GET", "/backups", nil)
		check("list", "GET", "/sandbox/shop/backups", nil)
		check("list", "GET", "/backups/"+b, nil)
		check("delete", "DELETE", "/backups/"+b, nil)
	}
	s.checkFile(id, "content")
	testkit.Diff(t, "the backups", s.backups("/backups"), []string{b})
}

// Each has a code and a remedy, also those that are added.
func TestEveryFailureOfAnObjectStoreIsMapped(t *testing.T) {
	kinds := constants(t, "runtime/sandbox", "ObjectStoreFailure")
	if len(kinds) != len(objectStoreProblems) {
		t.Errorf("there are %d kinds of failure, and %d are mapped", len(kinds), len(objectStoreProblems))
	}
	for _, kind := range kinds {
		if p, ok := objectStoreProblems[sandbox.ObjectStoreFailure(kind)]; !ok || p.what == "" || p.remedy == "" {
			t.Errorf("%s has no problem: %+v", kind, p)
		}
	}
}

func TestOtherRefusalsOfBackupsHaveCodes(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("shop")
	s.node.Backups.FailOnce("create", fmt.Errorf("%w (10000)", sandbox.ErrTooManyBackups))
	if p := s.refused(problem.BackupLimitExceeded, "POST", "/sandbox/shop/backup", map[string]any{}); !strings.Contains(p.Detail, "keep_last") {
		t.Errorf("the detail is %q", p.Detail)
	}
	s.node.Backups.FailOnce("create", fmt.Errorf(`%w: "a/b" has too many entries`, sandbox.ErrBackupUnsupported))
	if p := s.refused(problem.BackupUnsupported, "POST", "/sandbox/shop/backup", map[string]any{}); !strings.Contains(p.Detail, `"a/b" has too many entries; remove`) {
		t.Errorf("the detail is %q", p.Detail)
	}
	s.node.Backups.FailOnce("list", fmt.Errorf("%w: start the helper", sandbox.ErrEngineDown))
	s.refused(problem.EngineUnavailable, "GET", "/backups", nil)
	b := s.backUp("shop").ID
	s.node.Backups.FailOnce("restore", fmt.Errorf("write: %w", sandbox.ErrStoreFull))
	s.refused(problem.NodeDiskFull, "POST", "/sandbox/shop/restore", map[string]any{"backup_id": b})

	release := s.node.Backups.Block("create")
	defer release()
	stream := s.open("POST", "/sandbox/shop/backup", map[string]any{"stream": true})
	s.node.Backups.AwaitBlocked(t, "create")
	p := s.refused(problem.SandboxBusy, "POST", "/sandbox/shop/backup", map[string]any{})
	if !strings.Contains(p.Detail, "a backup of") || strings.Contains(p.Detail, "force") {
		t.Errorf("the detail is %q", p.Detail)
	}
	release()
	expectComplete[types.Backup](stream)
}

func TestRestoreWithForceEndsCommands(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("shop")
	s.node.Engine.Write(sandbox.ID(id), "f", "content")
	b := s.backUp("shop").ID
	s.node.Engine.Write(sandbox.ID(id), "f", "changed")
	lease, err := s.node.Manager.Acquire(t.Context(), sandbox.ID(id), sandbox.CauseExec)
	testkit.NoError(t, "Acquire", err)
	defer lease.Release()
	s.refused(problem.SandboxBusy, "POST", "/sandbox/shop/restore", map[string]any{"backup_id": b})
	s.checkFile(id, "changed")
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/shop/restore?force=true", map[string]any{"backup_id": b})
	s.checkFile(id, "content")
}

func TestRestoreOntoAnotherImageIsExplicit(t *testing.T) {
	s := newServer(t, Limits{})
	id := s.create("shop")
	s.node.Engine.Write(sandbox.ID(id), "f", "content")
	b := s.backUp("shop").ID
	s.node.Engine.Write(sandbox.ID(id), "f", "changed")
	s.node.Backups.RebuildImage()
	p := s.refused(problem.ImageMismatch, "POST", "/sandbox/shop/restore", map[string]any{"backup_id": b})
	if !strings.Contains(p.Detail, `"base"`) || !strings.Contains(p.Detail, "allow_other_image") {
		t.Errorf("the detail is %q", p.Detail)
	}
	s.checkFile(id, "changed")
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/shop/restore", map[string]any{"backup_id": b, "allow_other_image": true})
	s.checkFile(id, "content")
}

func TestNodeWithoutAnObjectStoreRefusesBackups(t *testing.T) {
	node := sandboxtest.Prepare(t, nil)
	node.Backups = nil
	node.Restart(t)
	t.Cleanup(func() { testkit.NoError(t, "Close", node.Manager.Close(context.Background())) })
	s := newServerOn(t, node, Limits{})
	s.http.Start()
	s.create("shop")
	for route, body := range map[string]any{
		"POST /sandbox/shop/backup": map[string]any{}, "GET /sandbox/shop/backups": nil, "GET /backups": nil, "GET /backups/aaaaaaaaaaaa": nil,
		"DELETE /backups/aaaaaaaaaaaa": nil, "POST /sandbox/shop/restore": map[string]any{"backup_id": "aaaaaaaaaaaa"},
	} {
		method, path, _ := strings.Cut(route, " ")
		if p := s.refused(problem.ObjectStoreRequired, method, path, body); !strings.Contains(p.Detail, "backups in the Caddyfile") {
			t.Errorf("%s: the detail is %q", route, p.Detail)
		}
	}
	// Snapshots need none.
	must[types.Snapshot](s, http.StatusCreated, "POST", "/sandbox/shop/snapshot", map[string]any{"name": "before"})
	must[types.Sandbox](s, http.StatusOK, "POST", "/sandbox/shop/restore", map[string]any{"snapshot_id": "before"})
}

// Owners see, restore and delete only their own backups.
func TestBackupsOfOthersAreNotFound(t *testing.T) {
	s := newServer(t, Limits{})
	s.create("shop")
	b := s.backUp("shop").ID
	other := *s
	other.api = newAPI(t, Config{Sandboxes: s.node.Manager, Egress: s.egress.Egress, Auth: SingleToken(testToken, "another")})
	other.http = httptest.NewServer(other.api)
	defer other.http.Close()
	other.create("shop")
	testkit.Diff(t, "the backups of the other owner", other.backups("/backups"), []string(nil))
	for _, method := range []string{"GET", "DELETE"} {
		other.refused(problem.BackupNotFound, method, "/backups/"+b, nil)
	}
	other.refused(problem.BackupNotFound, "POST", "/sandbox/shop/restore", map[string]any{"backup_id": b})
	testkit.Diff(t, "the backups", s.backups("/backups"), []string{b})
}
