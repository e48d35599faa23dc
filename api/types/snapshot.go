package types

import "time"

// Snapshot is the immutable disk of a sandbox, or a part of it.
type Snapshot struct {
	ID          string    `json:"id" doc:"12 characters of a-z and 0-9; never changes" example:"s7k2m9x4q3bz"`
	Name        string    `json:"name,omitempty" doc:"Unique among the owner's snapshots; missing if it has none" example:"before-upgrade"`
	Sandbox     string    `json:"sandbox" doc:"Id of the sandbox whose disk it is, which may be destroyed" example:"k3f9x2m7q2az"`
	SandboxName string    `json:"sandbox_name" doc:"Name that the sandbox had" example:"shop"`
	Image       string    `json:"image" doc:"Image on which its disk is based" example:"base"`
	Parent      string    `json:"parent,omitempty" doc:"Id of the snapshot on which it is based; missing if it is based on the image only"`
	CreatedAt   time.Time `json:"created_at" doc:"When it was taken"`
	ExpiresAt   time.Time `json:"expires_at,omitzero" doc:"When the node deletes it; missing without max_age"`
	SizeBytes   int64     `json:"size_bytes,omitempty" doc:"Disk space of what it adds to its parent or image; missing until it has been measured" example:"247463936"`
	Entries     int64     `json:"entries,omitempty" doc:"Files, folders and links that it adds; missing until they have been counted" example:"20201"`
	DurationMS  float64   `json:"duration_ms" doc:"How long the snapshot took, in milliseconds"`
	FrozenMS    float64   `json:"frozen_ms,omitempty" doc:"How long the programs of the sandbox were stopped for it, in milliseconds; missing if none ran"`
	Paths       []string  `json:"paths,omitempty" nullable:"false" doc:"Paths that the snapshot contains, with the image's files there; a restore replaces only these. Missing if it is the whole disk" example:"[\"/srv/shop\"]"`
}

// SnapshotList is a page of snapshots.
type SnapshotList struct {
	Snapshots  []Snapshot `json:"snapshots" nullable:"false" doc:"Snapshots, newest first"`
	NextCursor string     `json:"next_cursor,omitempty" doc:"Cursor of the next page; missing on the last page"`
}

// CreateSnapshotRequest takes a snapshot.
type CreateSnapshotRequest struct {
	Name       string    `json:"name,omitempty" doc:"1 to 63 of a-z, 0-9 and hyphens, unique among the owner's snapshots; default: none" example:"before-upgrade"`
	MaxAge     *Duration `json:"max_age,omitempty" doc:"Age at which the node deletes the snapshot; default: never" example:"168h"`
	RetainLast int       `json:"keep_last,omitempty" minimum:"0" maximum:"10000" doc:"How many of the sandbox's snapshots of the same paths without a name stay, this one included; the node deletes the oldest; default: all" example:"7"`
	Paths      []string  `json:"paths,omitempty" nullable:"false" maxItems:"100" doc:"Absolute paths of the only files and folders that the snapshot contains, without one inside another, of at most 4096 bytes each and 32 KiB together; default: the whole disk" example:"[\"/srv/shop\"]"`
	Quiesce    bool      `json:"quiesce,omitempty" doc:"Sync the sandbox's files first. The node does this for each snapshot, whatever the value"`
}

// RestoreRequest replaces the disk of a sandbox. Exactly one of SnapshotID and BackupID is set.
type RestoreRequest struct {
	SnapshotID      string `json:"snapshot_id,omitempty" maxLength:"63" doc:"Id or name of the snapshot; excludes backup_id" example:"before-upgrade"`
	BackupID        string `json:"backup_id,omitempty" maxLength:"63" doc:"Id of the backup, also of another sandbox; excludes snapshot_id" example:"b4n8r2t6w9xz"`
	AllowOtherImage bool   `json:"allow_other_image,omitempty" doc:"With backup_id: if the node does not have the image of the backup, use the image that has its name now; default: refuse with image_mismatch"`
	Stream          bool   `json:"stream,omitempty" doc:"With backup_id: respond with server-sent events while the backup is restored"`
}

// ForkRequest creates copies of a sandbox.
type ForkRequest struct {
	Count int      `json:"count" minimum:"1" maximum:"100" doc:"Number of new sandboxes" example:"3"`
	Names []string `json:"names,omitempty" nullable:"false" maxItems:"100" doc:"Name of each new sandbox; default: generated" example:"[\"try-1\",\"try-2\",\"try-3\"]"`
}

// ForkList is the result of a fork.
type ForkList struct {
	Sandboxes []Sandbox `json:"sandboxes" nullable:"false" doc:"New sandboxes, in the order of their names in the request"`
}
