package api

import (
	"encoding/json"
	"time"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/guest"
)

// exampleRequestID is the request id of all examples.
const exampleRequestID = "G2MGFUZCA7UASKWV"

// schemaDoc describes a schema of the document: the schema of the type of example.
type schemaDoc struct {
	example     any
	description string
}

// schemaDocs returns a row for each schema of the document.
func schemaDocs() []schemaDoc {
	const id, owner = "k3f9x2m7q2az", "operator"
	at := func(minute, second int) time.Time {
		return time.Date(2026, time.November, 21, 9, minute, second, 0, time.UTC)
	}
	text := func(d time.Duration) *types.Duration { return new(types.Duration(d)) }
	const digest = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

	command := types.Command{Command: "npm run build", Cwd: "/srv/shop", Env: map[string]string{"NODE_ENV": "production"}}
	exit := types.ExecExit{ExitCode: 0, DurationMS: 41.7}
	port := types.Port{
		Port: 3000, URL: "https://3000-k3f9x2m7q2az-w3n8v5c1x7z2k4ma.preview.example.com/", Access: types.AccessToken, Wake: types.WakeModeNavigation,
		HostHeader: types.HostHeaderAuto, Protocol: types.ProtocolAuto, WebSocket: types.WebSocketModeSleep, CreatedAt: at(31, 0),
	}
	process := types.Process{
		ID: "p-k3f9x2m7", PID: 42, Name: "web", Command: "npm run dev", Cwd: "/srv/shop", Restart: types.RestartOnWake, State: types.ProcessStateRunning,
		StartedAt: at(31, 2), LogFile: "/var/log/doze/web.log",
	}
	terminal := types.Terminal{ID: "main", PID: 57, Command: "bash", Cols: 120, Rows: 40, State: types.ProcessStateRunning, StartedAt: at(33, 0)}
	fileSystem := types.FileSystem{
		Path: "/var/lib/doze/.local/share/containers/storage", TotalBytes: 107374182400, UsedBytes: 32212254720, FreeBytes: 75161927680, ReserveBytes: 2147483648, OtherBytes: 27748466688,
	}
	sandboxDisk := types.SandboxDisk{
		ID: "k3f9x2m7q2az", Name: "shop", State: types.StateAsleep, DiskBytes: 247463936, MeasuredAt: at(0, 0), LimitBytes: 10737418240, FreedBytes: 494927872,
	}
	snapshot := types.Snapshot{
		ID: "s7k2m9x4q3bz", Name: "before-upgrade", Sandbox: id, SandboxName: "shop", Image: "base", Parent: "s2c8x5m7k9az", CreatedAt: at(40, 0),
		ExpiresAt: at(50, 0), SizeBytes: 247463936, Entries: 20201, DurationMS: 871.5, FrozenMS: 64.2, Paths: []string{"/srv/shop"},
	}
	backup := types.Backup{
		ID: "b4n8r2t6w9xz", Sandbox: id, SandboxName: "shop", Image: "base", CreatedAt: at(45, 0), SizeBytes: 247463936, Entries: 20201, StoredBytes: 1258291,
		DurationMS: 4182.3, FrozenMS: 64.2, Paths: []string{"/srv/shop"}, Excludes: []string{"*.log"}, Gitignore: true,
	}
	session := types.Session{
		ID: "dev", PID: 57, Shell: "bash", Cwd: "/srv/shop", State: types.ProcessStateRunning, StartedAt: at(31, 4),
	}
	codeContext := types.Context{ID: "analysis", Language: types.LanguagePython, Cwd: "/srv/shop", State: types.ProcessStateRunning, Process: "p-k3f9x2m7", StartedAt: at(31, 5)}
	codeValue := types.CodeValue{Data: map[string]any{"text/plain": "2"}, Main: true}
	codeError := types.CodeError{Name: "ZeroDivisionError", Message: "division by zero", Traceback: []string{"Cell In [1], line 1", "----> 1 1/0"}}
	codeEnd := types.CodeEnd{ExecutionCount: 1, DurationMS: 4.2}
	mount := types.Mount{Bucket: "datasets", Prefix: "images/2026", Path: "/data", ReadOnly: true, CreatedAt: at(3, 0)}
	listening := types.ListeningPort{Port: 3000, Addresses: []string{"127.0.0.1", "::1"}, PID: 57, Program: "node", Process: "p-k3f9x2m7"}
	sandbox := types.Sandbox{
		ID: id, Name: "shop", Owner: owner, Image: "base", ImageRef: "localhost/doze/base:latest", Size: "basic",
		State: types.StateRunning, StateSince: at(30, 1), Env: map[string]string{"NODE_ENV": "development"}, Labels: map[string]string{"team": "web"},
		SleepAfter: types.Duration(time.Minute), StopAfter: types.Duration(24 * time.Hour), ArchiveAfter: types.Duration(720 * time.Hour), Persist: types.PersistMemory, TTL: types.Duration(72 * time.Hour), ExpiresAt: at(72*60+30, 0),
		CreatedAt: at(30, 0), LastActiveAt: at(32, 0), Ports: []types.Port{port}, Processes: []types.Process{process},
		Usage: &types.Usage{CPUSeconds: 3.25, MemoryBytes: 83886080},
	}
	listed := sandbox
	listed.Env, listed.Processes, listed.Usage = nil, nil, nil
	archived := types.ArchivedDisk{BackupID: backup.ID, SizeBytes: backup.SizeBytes}
	file := types.File{Name: "app.js", Path: "/srv/shop/app.js", Type: types.FileTypeFile, Size: 512, Mode: "0644", ModifiedAt: at(29, 0), UID: 1000, GID: 1000,
		ETag: `"4f2a-200-18ca1e5d1f3b7c00-18ca1e5d1f4021aa"`, SHA256: digest[len("sha256:"):]}
	const hash = "8f3c1f0e5a4b7d6c9e2f1a0b3c4d5e6f7a8b9c0d"
	head := types.GitHead{Path: "/srv/doze", Branch: "main", Commit: hash}
	changed := types.GitFile{Path: "src/app.js", Index: types.GitChangeUnmodified, Worktree: types.GitChangeModified}
	difference := types.GitDiffFile{Path: "src/app.js", LinesAdded: 3, LinesDeleted: 1}
	identity := types.GitIdentity{Name: "Shop agent", Email: "agent@example.com"}
	commit := types.GitCommit{Commit: hash, Parents: []string{}, Author: identity, AuthoredAt: at(29, 0), Committer: identity, CommittedAt: at(29, 0), Message: "Add the cart\n"}
	branch := types.GitBranch{Name: "main", Current: true, Commit: hash, Upstream: "origin/main"}
	pushed := types.GitPushedRef{Ref: "refs/heads/cart", Status: types.GitPushStatusCreated, Summary: "[new branch]"}
	event := types.Event{
		Seq: 17, Type: types.EventTypeWoke, Time: at(40, 0), Sandbox: id, Kind: types.WakeKindWarm, DurationMS: 3.1, Cause: types.CausePreview,
	}
	feedEvent := types.FeedEvent{Event: event, SandboxName: "shop", Cursor: "8c1f2-204"}
	rule := types.Rule{
		Name: "github", Hosts: []string{"api.github.com"}, Methods: []string{"GET"}, Paths: []string{"/repos/*"},
		Policies: []types.RulePolicy{{Name: "bearer", Secrets: map[string]string{"token": "github"}}},
	}
	warning := types.Warning{Location: "body.rules[0].hosts[0]", Message: "the preset is not defined", Hint: "list presets with GET /egress/presets"}
	flow := types.Flow{
		Seq: 1795212060000001, Time: at(41, 0), Sandbox: id, Flow: "hocl097cxn", Kind: types.FlowKindRequest, Host: "api.github.com", Address: "192.0.2.10", Port: 443,
		Method: "GET", Path: "/repos/doze-run/doze", Rule: "owner/github", Policies: []types.FlowPolicy{{Name: "bearer", Digest: digest}},
		Verdict: types.VerdictAllow, Secrets: []string{"github"}, Status: 200, BytesOut: 180, BytesIn: 5120, DurationMS: 82.4,
	}
	secret := types.Secret{Name: "github", Hosts: []string{"api.github.com"}, Version: 2, CreatedAt: at(10, 0), UpdatedAt: at(20, 0)}
	policy := types.Policy{Name: "github", Digest: digest, Size: 248120, UpdatedAt: at(20, 0), UsedBy: []string{"owner/github"}}
	line := types.PolicyLine{Seq: 1795212060000002, Time: at(41, 0), Level: types.LogLevelInfo, Text: "added the token", Flow: "hocl097cxn", Sandbox: id, SandboxName: "shop"}
	preset := types.Preset{
		Name: "github", Description: "GitHub: web, API and git over HTTPS", Hosts: []string{"github.com", "api.github.com"}, Source: types.PresetSourceBuiltIn,
	}
	limits := types.Limits{CPUs: 0.5, MemoryBytes: 536870912, PIDs: 512, DiskBytes: 10737418240, Files: 1000000}
	pending := types.PendingOperation{
		Operation: types.OperationDestroy, Sandbox: "p2c8v4b1n6ml", Since: at(35, 0), Attempts: 3, NextAttemptAt: at(45, 0), Error: "podman is not available",
	}
	quarantined := types.QuarantinedSandbox{ID: "t5h7w9d3s1qa", Name: "blog", Image: "base", Size: "basic", CreatedAt: at(5, 0), HasContainer: true}
	explained := types.ExplainedPolicy{Rule: "owner/github", Name: "bearer", Digest: digest}
	invalid := problem.New(problem.RequestInvalid, "body.name: it has 70 characters; use at most 63").For(exampleRequestID).
		WithErrors(problem.FieldError{Location: "body.name", Message: "it has 70 characters", Hint: "use at most 63"})
	lostTerminal := problem.New(problem.TerminalLost, "the terminal main has ended, because its sandbox stopped (requested); connect without since to open a new one").For(exampleRequestID)

	return []schemaDoc{
		// Sandboxes.
		{sandbox, "A named Linux environment with its own disk, processes and network."},
		{types.SandboxList{Sandboxes: []types.Sandbox{listed}, NextCursor: "shop"}, "A page of sandboxes, in the order of their names."},
		{types.CreateSandboxRequest{Name: "shop", Image: "python", Size: "basic", Labels: map[string]string{"team": "web"}, SleepAfter: text(time.Minute), TTL: text(24 * time.Hour), Warm: []types.Language{types.LanguagePython}},
			"The sandbox to create. Every field is optional."},
		{types.UpdateSandboxRequest{Labels: &map[string]string{"team": "web"}, SleepAfter: text(5 * time.Minute)}, "Changes to a sandbox. Missing fields stay as they are."},
		{types.ArchiveSandboxRequest{Stream: true}, "How to archive a sandbox."},
		{archived, "The disk of an archived sandbox, in the object store."},
		{types.HoldRequest{Duration: types.Duration(30 * time.Minute)}, "How long a sandbox stays awake."},
		{types.Usage{CPUSeconds: 3.25, MemoryBytes: 83886080, DiskBytes: 247463936, Files: 20412}, "CPU time, memory and disk of a sandbox."},
		{types.DiskUsage{Bytes: 10737418240, Files: 1000000}, "An amount of disk space and files."},
		{types.Condition{Code: types.ConditionCodeWakeFailed, Message: "its last wake failed: the container engine is not available", Since: at(38, 0)},
			"A problem of a sandbox that lasts."},

		// Commands.
		{types.ExecRequest{Command: command, Timeout: text(5 * time.Minute)}, "A command to run to its end."},
		{types.ExecResult{Stdout: "built in 41 ms\n", ExecExit: exit}, "How a command ended, with its output."},
		{types.ExecStart{PID: 42}, "Data of the event `start`: the command runs."},
		{types.Output{Data: "built in 41 ms\n"}, "Data of the events `stdout` and `stderr`: a piece of output."},
		{types.ExecComplete{ExecExit: exit}, "Data of the event `complete`, the last one: how the command ended."},
		{types.ExecCommand{Type: types.ExecMessageTypeExec, Command: types.Command{Argv: []string{"sort", "-u"}}, StreamStdin: true},
			"Message of the client, the first one: the command to run."},
		{types.ExecStdinEOF{Type: types.ExecMessageTypeStdinEOF}, "Message of the client: its input has ended."},
		{types.Keepalive{Type: types.ExecMessageTypeKeepalive}, "Message of the client: it is connected, but does not read at the moment."},
		{types.ExecStarted{Type: types.ExecMessageTypeStart, PID: 42, StdinWindowBytes: 262144}, "Message of the node: the command runs."},
		{types.ExecStdinAck{Type: types.ExecMessageTypeStdinAck, Bytes: 4096}, "Message of the node: the command's pipe accepted input."},
		{types.ExecStdinClosed{Type: types.ExecMessageTypeStdinClosed}, "Message of the node: the command reads no more input. Further input is discarded."},
		{types.ExecCompleted{Type: types.ExecMessageTypeComplete, ExecExit: exit}, "Message of the node, the last one: how the command ended."},
		{types.ExecFailed{Type: types.ExecMessageTypeError, Problem: problem.New(problem.CommandNotFound, "no program sort in the sandbox's PATH").For(exampleRequestID)},
			"Message of the node, the last one: why the command did not start, or why its end is unknown."},

		// Processes.
		{types.Environment{Env: map[string]string{"NODE_ENV": "test"}}, "The environment of the commands of a sandbox."},
		{types.UpdateEnvironmentRequest{Env: map[string]*string{"NODE_ENV": new("test"), "DEBUG": nil}}, "Changes to the environment of a sandbox."},
		{session, "A session of a sandbox: a shell that runs one command after the other."},
		{snapshot, "The immutable disk of a sandbox."},
		{types.SnapshotList{Snapshots: []types.Snapshot{snapshot}, NextCursor: snapshot.ID}, "A page of snapshots."},
		{types.CreateSnapshotRequest{Name: "before-upgrade", MaxAge: new(types.Duration(168 * time.Hour)), RetainLast: 7, Paths: []string{"/srv/shop"}, Quiesce: true}, "A snapshot to create."},
		{types.RestoreRequest{SnapshotID: "before-upgrade"}, "The snapshot or backup to restore."},
		{backup, "The disk of a sandbox in an object store."},
		{types.BackupList{Backups: []types.Backup{backup}, NextCursor: backup.ID}, "A page of backups."},
		{types.CreateBackupRequest{Paths: []string{"/srv/shop"}, Excludes: []string{"*.log"}, Gitignore: true, RetainLast: 7}, "A backup to create."},
		{types.BackupProgress{Phase: types.BackupPhaseUpload, Bytes: 123731968, TotalBytes: 247463936, Entries: 9120, TotalEntries: 20201},
			"Data of the event `progress`: how far a backup, a restore or an archival is."},
		{types.ForkRequest{Count: 2, Names: []string{"try-1", "try-2"}}, "The sandboxes to create."},
		{types.ForkList{Sandboxes: []types.Sandbox{sandbox}}, "The sandboxes that a fork created."},
		{types.SessionList{Sessions: []types.Session{session}}, "The sessions of a sandbox."},
		{types.OpenSessionRequest{ID: "dev", Cwd: "/srv/shop", Env: map[string]string{"NODE_ENV": "test"}}, "A session to open."},
		{codeContext, "A context of a sandbox: an interpreter that executes code and retains its state."},
		{types.ContextList{Contexts: []types.Context{codeContext}}, "The contexts of a sandbox."},
		{types.OpenContextRequest{ID: "analysis", Language: types.LanguagePython, Cwd: "/srv/shop"}, "A context to open."},
		{types.RunCodeRequest{Code: "1 + 1", Timeout: text(time.Minute)}, "Code to execute in a context."},
		{types.CodeResult{Results: []types.CodeValue{codeValue}, CodeEnd: codeEnd}, "How the execution of code ended, with its output."},
		{types.CodeValue{Data: map[string]any{"text/plain": "<Figure size 640x480>", "image/png": "iVBORw0KGgo="}, Metadata: map[string]any{"image/png": map[string]any{"width": 640}}, DisplayID: "progress", Update: true}, "Data of the event `result`: a value that the code displayed, or the value of its last expression, in every form that it offers."},
		{codeError, "Data of the event `error`: the exception that ended the code."},
		{types.CodeClear{Wait: true}, "Data of the event `clear`: the code removed its output so far."},
		{types.CodeComplete{CodeEnd: codeEnd}, "Data of the event `complete`, the last one: how the execution of code ended."},
		{process, "A background process of a sandbox."},
		{types.ProcessList{Processes: []types.Process{process}}, "The background processes of a sandbox."},
		{types.StartProcessRequest{Command: types.Command{Command: "npm run dev", Cwd: "/srv/shop"}, Name: "web", Restart: types.RestartOnWake}, "A process to start in the background."},
		{types.ReadyCondition{Port: 3000, Timeout: types.Duration(30 * time.Second)}, "When a process is ready: exactly one of `port`, `log`, `http` and `exit`."},
		{types.ReadyHTTP{Port: 3000, Path: "/health", Status: "2xx"}, "A GET request inside the sandbox, repeated until its response has the status. Redirects are not followed."},
		{types.ReadyProcess{Process: process, Listening: &listening, WaitedMS: 812.4}, "A process for which the condition holds."},
		{types.Log{Logs: []types.LogChunk{{Stream: types.LogStreamStdout, Output: types.Output{Data: "listening on port 3000\n"}}}}, "The end of a process's log."},
		{types.LogChunk{Stream: types.LogStreamStdout, Output: types.Output{Data: "listening on port 3000\n"}}, "Consecutive output of a process to one stream."},
		{types.LogsDropped{Bytes: 65536}, "Data of the event `dropped`: output that a stream lost because its client read too slowly."},

		// Terminals.
		{terminal, "A terminal of a sandbox, with its program."},
		{types.TerminalList{Terminals: []types.Terminal{terminal}}, "The terminals of a sandbox."},
		{types.TerminalResize{Type: types.TerminalMessageTypeResize, Cols: 132, Rows: 50}, "Message of the client: the size of its window."},
		{types.TerminalSignal{Type: types.TerminalMessageTypeSignal, Signal: "SIGINT"}, "Message of the client: a signal for the process group in the foreground."},
		{types.TerminalTruncated{Type: types.TerminalMessageTypeTruncated, Cursor: 1310720}, "Message of the node: output before the cursor is missing."},
		{types.TerminalReady{Type: types.TerminalMessageTypeReady, ID: "main", Cursor: 5120}, "Message of the node: all output from before the connection was sent."},
		{types.TerminalExit{Type: types.TerminalMessageTypeExit, Code: 0}, "Message of the node, the last one: how the program ended."},
		{types.TerminalFailed{Type: types.TerminalMessageTypeError, Message: lostTerminal.Detail, Problem: lostTerminal}, "Message of the node, the last one: why the connection failed."},

		// Files.
		{file, "A file, directory or symbolic link of a sandbox."},
		{types.FileList{Files: []types.File{file}}, "Files of a directory."},
		{types.WriteFileRequest{Path: "/srv/shop/app.js", Content: "console.log('hello')\n", CreateNew: true, Mode: "0644"}, "A file to write, with its content."},
		{types.MakeDirectoryRequest{Path: "/srv/shop/data", Mode: "0755"}, "A directory to make."},
		{types.MoveFileRequest{From: "/srv/shop/old.js", To: "/srv/shop/new.js"}, "A file to move."},
		{types.FileSearch{Files: []types.File{}, Matches: []types.FileMatch{{Path: "/srv/shop/app.js", Line: 12, Column: 3, Text: "  console.log('hello')"}}, Stopped: types.SearchStopLimit},
			"Files, or lines of files, that match a search."},
		{types.FileMatch{Path: "/srv/shop/app.js", Line: 12, Column: 3, Text: "  console.log('hello')"}, "A line of a file that matches a search."},
		{types.SignFileURLRequest{Path: "/srv/shop/report.pdf", Operation: types.FileOperationWrite, ExpiresIn: text(15 * time.Minute), CreateNew: true, MaxBytes: 10485760},
			"A signed URL to make."},
		{types.SignTerminalURLRequest{ExpiresIn: text(12 * time.Hour), Origin: "https://shop.example.com"}, "A signed URL of terminals to make."},
		{types.SignedURL{
			URL:    "https://api.example.com/api/v1/sandbox/k3f9x2m7q2az/files/write?expires=1795253340&max_bytes=10485760&path=%2Fsrv%2Fshop%2Freport.pdf&signature=2lVdGvP0x1Zx8t0uWvY7d8Zk3vYqk1mJm8f3wQd0b7E",
			Method: "PUT", ExpiresAt: at(45, 0),
		}, "A URL to use without a token, here to write a file."},
		{types.ArchiveResult{Files: 12, Bytes: 48213}, "How much an archive held that was unpacked."},
		{types.WatchStarted{Path: "/srv/shop", Recursive: true, Include: []string{}, Exclude: []string{".git", "node_modules"}, Directories: 12, Cursor: "k3f9x2m7-0"},
			"Data of the event `watching`, the first one: every later change is reported."},
		{types.FileEvent{Type: types.FileEventTypeMove, Path: "/srv/shop/new.js", From: "/srv/shop/old.js", Cursor: "k3f9x2m7-17"},
			"Data of the event `event`: a change of a file or directory."},
		{types.WatchOverflow{Reason: types.WatchOverflowReasonSlowClient, Detail: overflowDetails[guest.WatchSlowClient], Dropped: 120, Cursor: "k3f9x2m7-137"},
			"Data of the event `overflow`: changes were lost. List the directory; all later changes are reported."},
		{types.WatchStopped{Reason: types.WatchStopReasonSandboxEnded, State: types.StateStopped, StateReason: types.StateReasonRequested, Detail: "the sandbox is stopped (requested)"},
			"Data of the event `stopped`, the last one: why the watch has ended."},

		// Git.
		{types.GitCloneRequest{URL: "https://github.com/doze-run/doze.git", Branch: "main", TargetDir: "/srv/doze", Depth: 1}, "A repository to clone."},
		{head, "The commit that is checked out."},
		{types.GitProgress{Phase: types.GitPhaseReceiving, Done: 450, Total: 1000, Bytes: 1258291}, "Data of the event `progress`: how far git is."},
		{types.GitStatus{GitHead: head, Upstream: "origin/main", Ahead: 1, Files: []types.GitFile{changed}}, "The state of a working tree."},
		{changed, "A file that differs from the commit."},
		{types.GitCheckoutRequest{Path: "/srv/doze", Ref: "cart", Create: true}, "The branch, tag or commit to check out."},
		{types.GitAddRequest{Path: "/srv/doze", Files: []string{"src/app.js"}}, "Changes to stage."},
		{identity, "Author or committer of a commit."},
		{types.GitCommitRequest{Path: "/srv/doze", Message: "Add the cart", All: true, Author: &identity}, "The changes to commit."},
		{types.GitPushRequest{Path: "/srv/doze", Branch: "cart", SetUpstream: true}, "The branch to push."},
		{types.GitPullRequest{Path: "/srv/doze"}, "The branch to pull."},
		{types.GitPushResult{Remote: "origin", Refs: []types.GitPushedRef{pushed}}, "The refs that a push changed."},
		{pushed, "A ref of the remote after a push."},
		{types.GitDiff{Patch: "diff --git a/src/app.js b/src/app.js\n…", Files: []types.GitDiffFile{difference}}, "The difference of two states."},
		{difference, "A file that differs."},
		{types.GitLog{Commits: []types.GitCommit{commit}}, "The history of a revision."},
		{commit, "A commit."},
		{types.GitBranchList{Branches: []types.GitBranch{branch}}, "The branches of a repository."},
		{branch, "A branch."},

		// Ports.
		{port, "A port of a sandbox with its preview URL."},
		{types.PortList{Ports: []types.Port{port}, Listening: []types.ListeningPort{listening}}, "The ports of a sandbox: those with a preview, and those with a server."},
		{listening, "A port on which a process listens."},
		{types.ExposePortRequest{Port: 3000, Access: types.AccessToken, Wake: types.WakeModeNavigation, WaitTimeout: types.Duration(10 * time.Second)}, "A port to expose."},

		// Mounts.
		{mount, "A bucket that is mounted in a sandbox."},
		{types.MountList{Mounts: []types.Mount{mount}}, "The mounts of a sandbox."},
		{types.MountRequest{Bucket: "datasets", Prefix: "images/2026", Path: "/data", ReadOnly: true}, "A bucket to mount."},

		// Events.
		{event, "An entry of a sandbox's timeline."},
		{types.EventList{Events: []types.Event{event}, NextCursor: "17"}, "A page of a sandbox's timeline."},
		{feedEvent, "An event of any of the owner's sandboxes."},
		{types.FeedPage{Events: []types.FeedEvent{feedEvent}, NextCursor: "8c1f2-204"}, "A page of the events of all of the owner's sandboxes."},
		{types.FeedGap{Detail: "events before this one are no longer retained"}, "Data of the event `gap`: the stream has missed events."},

		// The node.
		{types.Node{
			ID: "n4d8s2k6", Version: "v1.0.0", StartedAt: at(0, 0), Engine: types.EngineStatus{OK: true},
			Sandboxes: map[types.State]int{types.StateRunning: 1, types.StateAsleep: 12}, Leases: 1, Sizes: map[string]types.Limits{"basic": limits},
			Images: []string{"base"}, AllowedImages: []string{"registry.example.com/team/*"}, EnforcedLimits: []string{"cpu", "memory", "pids"},
			PendingOperations: []types.PendingOperation{pending}, Quarantined: []types.QuarantinedSandbox{quarantined},
		}, "The state of the node."},
		{types.NodeDiskUsage{
			FileSystems: []types.FileSystem{fileSystem}, Sandboxes: types.DiskTotal{Count: 13, Bytes: 3217031168}, Snapshots: types.DiskTotal{Count: 4, Bytes: 989855744},
			UnusedSnapshots: types.DiskTotal{Count: 2, Bytes: 524288000}, Bases: types.DiskTotal{Count: 1, Bytes: 247463936}, StoreBytes: 9437184, LargestSandboxes: []types.SandboxDisk{sandboxDisk},
		}, "The disk usage of the node, and the space that deletions would free."},
		{types.DiskTotal{Count: 4, Bytes: 989855744}, "The number of sandboxes or snapshots, and the sum of their disk space."},
		{fileSystem, "The space of a file system that sandboxes write to."},
		{sandboxDisk, "The disk of a sandbox, and what its deletion frees."},
		{types.EngineStatus{OK: true}, "Whether the container engine works."},
		{limits, "The limits of a sandbox of a size."},
		{pending, "Work that failed and is tried again."},
		{quarantined, "A container or folder of a sandbox that the node has no record of."},
		{types.AdoptRequest{Name: "blog"}, "How to adopt a sandbox from quarantine."},

		// Egress.
		{rule, "Which requests it matches, and what happens to them."},
		{types.RuleResponse{Status: 404, Body: "not here\n"}, "A response that a rule sends instead of the host."},
		{types.RulePolicy{Name: "bearer", Config: json.RawMessage(`{"header":"Authorization"}`), Secrets: map[string]string{"token": "github"}}, "A policy that a rule runs."},
		{types.RuleSet{Revision: 7, UpdatedAt: at(20, 0), Default: types.RuleDefaultInherit, Rules: []types.Rule{rule}, Warnings: []types.Warning{warning}},
			"The rules of an owner or of a sandbox."},
		{types.SetRulesRequest{Default: types.RuleDefaultDeny, Rules: []types.Rule{rule}}, "The rules that replace all rules of an owner or of a sandbox."},
		{types.NodeRules{Default: types.RuleDefaultAllowPublic, Rules: []types.Rule{{Name: "metadata", Addresses: []string{"169.254.0.0/16"}, Action: types.RuleActionDeny}}},
			"The rules in the node's configuration."},
		{warning, "Something that was accepted and may not work as intended."},
		{preset, "A named list of hosts for rules."},
		{types.PresetList{Presets: []types.Preset{preset}}, "The presets."},
		{flow, "A refused DNS query, a TCP connection or an HTTP request of a sandbox or of a client of the proxy."},
		{types.FlowPolicy{Name: "bearer", Digest: digest}, "A policy that ran."},
		{types.FlowList{Flows: []types.Flow{flow}, NextCursor: "1795212060000001"}, "A page of flows."},
		{types.ExplainRequest{Method: "GET", URL: "https://api.github.com/user", Headers: map[string]string{"Accept": "application/json"}}, "A request to explain. It is not sent."},
		{types.Explanation{
			Verdict: types.VerdictAllow, Stage: types.StageRequest, Rule: "owner/github", Reason: "the rule allows it, and its policies can still refuse it",
			Policies: []types.ExplainedPolicy{explained}, Secrets: []types.ExplainedSecret{{Name: "github"}},
		}, "How the rules apply to a request."},
		{explained, "A policy that would run."},
		{types.ExplainedSecret{Name: "github"}, "A secret that could be sent."},
		{secret, "A secret, without its value."},
		{types.SecretList{Secrets: []types.Secret{secret}}, "The owner's secrets."},
		{types.SetSecretRequest{Value: "an access token", Hosts: []string{"api.github.com"}}, "The value of a secret and the hosts that it may be sent to."},
		{policy, "A program that inspects and changes outgoing requests."},
		{types.PolicyList{Policies: []types.Policy{policy}}, "The owner's policies and the built-in ones."},
		{line, "A line that a policy wrote."},
		{types.PolicyLog{Lines: []types.PolicyLine{line}, NextCursor: "1795212060000002"}, "A page of lines that a policy wrote."},

		// Errors.
		{*invalid, "A problem document (RFC 9457): why a request failed."},
		{invalid.Errors[0], "One error of an invalid request."},
		{problem.FailedProcess{ID: "p-k3f9x2m7", Name: "web", ExitCode: new(1), Output: "Error: port 3000 is in use\n"}, "A background process that has ended, or is not ready in time."},
	}
}
