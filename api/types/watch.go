package types

// FileEvent is a change of a file or directory.
type FileEvent struct {
	Type         FileEventType `json:"type" doc:"What happened. delete and move of a directory include everything below it"`
	Path         string        `json:"path" doc:"Absolute path; of move: the new one" example:"/srv/shop/app.js"`
	From         string        `json:"from,omitempty" doc:"Of move: the path before"`
	PathEncoding Encoding      `json:"path_encoding,omitempty" enum:"base64" doc:"base64 if path or from is not UTF-8: both are in base64 then; missing otherwise"`
	IsDir        bool          `json:"is_dir" doc:"Whether it is a directory. A symbolic link is not"`
	Cursor       string        `json:"cursor" doc:"Last-Event-ID for continuing after this event" example:"k3f9x2m7-17"`
}

// FileEventType is what happened to a file or directory.
type FileEventType string

const (
	FileEventTypeCreate FileEventType = "create" // also when it was moved in from elsewhere
	FileEventTypeModify FileEventType = "modify" // its content may have changed
	FileEventTypeDelete FileEventType = "delete" // also when it was moved elsewhere
	FileEventTypeMove   FileEventType = "move"   // within what is watched
	FileEventTypeAttrib FileEventType = "attrib" // owner, permissions, times or extended attributes
)

// Values returns all types.
func (FileEventType) Values() []FileEventType {
	return []FileEventType{FileEventTypeCreate, FileEventTypeModify, FileEventTypeDelete, FileEventTypeMove, FileEventTypeAttrib}
}

// WatchStarted is the data of the event watching: every later change is reported.
type WatchStarted struct {
	Path        string   `json:"path" doc:"The watched directory or file"`
	Recursive   bool     `json:"recursive" doc:"Whether directories below are watched"`
	Include     []string `json:"include" nullable:"false" doc:"Patterns of the files that are reported; empty: all"`
	Exclude     []string `json:"exclude" nullable:"false" doc:"Patterns of what is not watched"`
	Resumed     bool     `json:"resumed" doc:"Whether the stream continues after Last-Event-ID without a loss"`
	Directories int      `json:"directories" doc:"Number of watched directories"`
	Unreadable  int      `json:"unreadable" doc:"Number of directories that are not watched because they cannot be read"`
	Cursor      string   `json:"cursor" doc:"Last-Event-ID for continuing from here" example:"k3f9x2m7-0"`
}

// WatchOverflow is the data of the event overflow: changes were lost. All later ones are
// reported.
type WatchOverflow struct {
	Reason       WatchOverflowReason `json:"reason" doc:"Why changes were lost"`
	Detail       string              `json:"detail" doc:"Description for people"`
	Dropped      uint64              `json:"dropped,omitempty" doc:"Of slow_client: number of events that were lost"`
	Path         string              `json:"path,omitempty" doc:"Of path_unreadable: the directory" example:"/srv/shop/private"`
	PathEncoding Encoding            `json:"path_encoding,omitempty" enum:"base64" doc:"base64 if path is not UTF-8; missing otherwise"`
	Cursor       string              `json:"cursor" doc:"Last-Event-ID for continuing after this event" example:"k3f9x2m7-18"`
}

// WatchOverflowReason is why changes were lost.
type WatchOverflowReason string

const (
	WatchOverflowReasonQueueFull      WatchOverflowReason = "queue_full"      // faster than the sandbox could record them
	WatchOverflowReasonSlowClient     WatchOverflowReason = "slow_client"     // faster than the client read them
	WatchOverflowReasonCursorExpired  WatchOverflowReason = "cursor_expired"  // the sandbox has discarded the changes after Last-Event-ID
	WatchOverflowReasonPathUnreadable WatchOverflowReason = "path_unreadable" // a new directory cannot be read
)

// Values returns all reasons.
func (WatchOverflowReason) Values() []WatchOverflowReason {
	return []WatchOverflowReason{
		WatchOverflowReasonQueueFull, WatchOverflowReasonSlowClient, WatchOverflowReasonCursorExpired, WatchOverflowReasonPathUnreadable,
	}
}

// WatchStopped is the data of the event stopped, the last one.
type WatchStopped struct {
	Reason      WatchStopReason `json:"reason" doc:"Why the watch has ended"`
	State       State           `json:"state,omitempty" enum:"stopped,destroyed" doc:"Of sandbox_ended: the state of the sandbox"`
	StateReason StateReason     `json:"state_reason,omitempty" doc:"Of sandbox_ended: why it is in this state, if that is known"`
	Detail      string          `json:"detail" doc:"Description for people"`
}

// WatchStopReason is why a watch has ended.
type WatchStopReason string

const (
	WatchStopReasonRootDeleted    WatchStopReason = "root_deleted"    // the watched directory
	WatchStopReasonRootMoved      WatchStopReason = "root_moved"      // the watched directory
	WatchStopReasonRootUnreadable WatchStopReason = "root_unreadable" // changes were lost, and the watched directory cannot be read again
	WatchStopReasonDirectoryLimit WatchStopReason = "directory_limit" // a new directory is more than may be watched
	WatchStopReasonSandboxEnded   WatchStopReason = "sandbox_ended"   // it was stopped or destroyed
)

// Values returns all reasons.
func (WatchStopReason) Values() []WatchStopReason {
	return []WatchStopReason{
		WatchStopReasonRootDeleted, WatchStopReasonRootMoved, WatchStopReasonRootUnreadable, WatchStopReasonDirectoryLimit, WatchStopReasonSandboxEnded,
	}
}
